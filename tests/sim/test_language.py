"""Goal: a mistake in a scenario file is an error with its line, and a misspelt word gets a
suggestion; a file that is right is read as it is written.

Method: one small text for each mistake. Nothing runs, except where a name can be checked only then.
"""

import pytest

from engine.sim.language import ScenarioError, parse
from engine.sim.scenario import run_text
from engine.sim.values import Golden, Prefix, Span

CLUSTER = "cluster unified=1 pages=64 page_size=16\n"

MISTAKES = [
    ("submitt r1", "unknown command 'submitt' (did you mean 'submit'?)"),
    ("pages=4", "unknown command 'pages'"),
    ("submit", "write 'submit RID"),
    ("submit r1 promt=5", "'submit' has no option 'promt' (did you mean 'prompt'?)"),
    ("submit r1 prompt=x", "prompt=x: a whole number N or a range A..B is wanted"),
    ("submit r1 prompt=9..3", "prompt=9..3: the range is empty"),
    ("submit r1 prompt=5 prompt=6", "prompt= is given twice"),
    ("submit r1 max_tokens=-1", "max_tokens=-1: a whole number"),
    ("submit r1 prefix=A", "prefix=A: NAME:LENGTH is wanted"),
    ("submit r1 stop=@0", "stop=@0: output tokens are counted from 1"),
    ('submit r1 stop=""', "stop=: a stop string is not empty"),
    ('submit r1 stop="ab', "a quote is not closed"),
    ("submit r1 deadline=5", "deadline=5: a duration such as 50ms"),
    ("submit r1 temperature=warm", "temperature=warm: a number is wanted"),
    ("submit r1#0", "'r1#0' is no name for a request"),
    ("submit all", "'all' is no name for a request"),
    ("submit r1 to=unified-1", "unknown node 'unified-1' (did you mean 'unified-0'?)"),
    ("submit r1\nsubmit r1", "'r1' is submitted already; 'rid=r1' repeats a rid"),
    ("submit r1 max_tokens=3 stop=@4", "@4: the request says only 3 tokens"),
    ("run soon", "run soon: a duration such as 50ms, 1s or 100us is wanted, or 'until'"),
    ("run 5ms 6ms", "write 'run DURATION'"),
    ("run until r1", "write 'run until RID PHASE'"),
    ("submit r1\nrun until r2 decoding", "unknown request 'r2' (known: r1)"),
    ("submit r1\nrun until r1 decodin", "unknown phase 'decodin' (did you mean 'decoding'?)"),
    ("submit r1\nrun until r1 state=hold", "unknown state 'hold'"),
    ("step decode-0", "unknown node 'decode-0'"),
    ("hold stap unified-0", "unknown thing to hold 'stap' (did you mean 'step'?)"),
    ("hold commit unified-0 chunk=2", "chunk= is for 'hold step'"),
    ("hold store unified-0", "this cluster has no store"),
    ("release step unified-0", "step is not held"),
    ("fail wires unified-0", "unknown thing to fail 'wires' (did you mean 'wire'?)"),
    ("submit r1\nfail wire r1", "this cluster has no wire"),
    ("hold wire unified-0", "only a prefill node writes to a wire"),
    ("drop message hello to unified-0", "write 'drop message KIND from NODE to NODE"),
    ("delay message hello from a to b", "by= says how long"),
    ("kill decode-0", "unknown node 'decode-0' (known: unified-0)"),
    ("drop message hello from unified-0 to unified-0", "unified-0 has no peers"),
    ("drop message helo from unified-0 to x", "unknown kind of message 'helo'"),
    ("thaw unified-0", "unified-0 is not frozen"),
    ("kill rank unified-0 1", "unified-0 has no followers (ranks=N)"),
    ("kill rank unified-0", "write 'kill rank NODE RANK'"),
    ("delay rank unified-0 1", "write 'delay rank NODE RANK by=DURATION'"),
    ("drop plan unified-1 1", "unknown node 'unified-1'"),
    ("duplicate plan unified-0 1", "unified-0 has no followers (ranks=N)"),
    ("corrupt plans unified-0 1", "write 'corrupt plan NODE RANK'"),
    ("expect lost", "write 'expect lost NODE"),
    ("kill unified-0\nkill unified-0", "unified-0 is dead already"),
    ("pause unified-0 mode=later", "one of abort, retract, in_place is wanted"),
    ("submit r1\nexpect forwards r1 unified-0", "write 'expect forwards RID NODE = N'"),
    ("submit r1\nexpect r1 tokens=3 on=unified-0", "on= says where a state or a phase"),
    ("submit r1\nexpect r1 state=decoding on=decode-1", "unknown node 'decode-1'"),
    ("fail store unified-0", "this cluster has no store"),
    ("abort r1", "unknown request 'r1' (there are none)"),
    ("disconnect r1", "unknown request 'r1'"),
    ("exhaust pages unified-0", "write 'exhaust pages NODE leave=N'"),
    ("exhaust rows unified-0 leave=1", "unknown pool to exhaust 'rows'"),
    ("open door d1", "unknown thing 'door'"),
    ("close door d1", "unknown thing 'door'"),
    ("submit r1\nexpect r1", "what is expected?"),
    ("submit r1\nexpect r1 gold", "what is expected?"),
    ("expect bse", "unknown expectation or request 'bse' (did you mean 'base'?)"),
    ("expect base unified-2", "unknown node 'unified-2'"),
    ("submit r1\nexpect r1 finished=lenght", "unknown way to finish 'lenght'"),
    ("submit r1\nexpect r1 flushed=yes", "unknown property of a request 'flushed'"),
    ("submit r1\nexpect held r1", "write 'expect held RID pages=N"),
    ("submit r1\nexpect held r1 host_page=0", "'expect' has no option 'host_page'"),
    ("submit r1\nexpect held r1 tokens=0", "unknown option of 'expect held' 'tokens'"),
    ("expect base tokens=3", "unknown option of 'expect base' 'tokens'"),
    ("submit r1\nexpect r1 within=5ms", "what is expected?"),
    ("submit r1\nexpect r1 status=5x", "a status such as 503, 5xx or 500|503 is wanted"),
    ("submit r1\nrun until r1 decoding tokens=3", "write 'run until RID PHASE'"),
    ("submit r1\nrun until r1 finished=lenght", "unknown way to finish 'lenght'"),
    ("exhaust pages unified-0 leave=65", "leave=65: there are only 64 pages"),
    ("submit r1\nexpect never r1", "write 'expect never RID"),
    ("submit r1\nexpect no r1", "write 'expect no answer RID'"),
    ("submit r1\nexpect order r1 r1", "write 'expect order EVENT RID RID"),
    ("submit r1\nexpect order admitt r1 r1", "unknown event 'admitt' (did you mean 'admit'?)"),
    ("expect ledger unified-0 pages.free", "a comparison such as 'pages.free = 64' is wanted"),
    ("expect ledger unified-0 paes.free = 1", "unknown pool 'paes' (did you mean 'pages'?)"),
    ("expect ledger unified-0 pages.fre = 1", "unknown class 'fre' (did you mean 'free'?)"),
    ("expect load unified-0 runing = 1", "unknown figure 'runing' (did you mean 'running'?)"),
    ("expect reply", "write 'expect reply KEY=VALUE"),
    ("cluster unified=1", "a scenario has one 'cluster'"),
    ("end", "'end' without 'repeat'"),
    ("repeat 3\nsubmit r{i}", "'repeat' without 'end'"),
    ("repeat many\nend", "write 'repeat COUNT'"),
    ("submit r{i}", "no loop counts {i}"),
    ("repeat 2 k\nsubmit r{i}\nend", "no loop counts {i}"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        run_text(CLUSTER + text, "some.scenario")
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.scenario:")
    assert 2 <= caught.value.line <= 3


CLUSTERS = [
    ("", "there is no 'cluster' command"),
    ("submit r1", "'cluster' has to come first"),
    ("cluster prefill=1 router=1", "prefill= and decode= go together behind a router"),
    ("cluster unified=2\nhold commit", "which node? There are unified-0, unified-1"),
    ("cluster unified=2\nsubmit r1", "to= says which node; there is no router"),
    ("cluster unified=2\nopen session s", "a session is at one node, and this cluster has several"),
    ("cluster prefill=1 decode=1 router=1\nclose session s", "a session is at one node"),
    ("cluster prefill=1 decode=1\nfail wire r1\nsubmit r2 to=prefill-0", "unknown request 'r1'"),
    ("cluster prefill=1 decode=1\nfail wire g#2\nsubmit g n=2 to=prefill-0", "request 'g#2'"),
    ("cluster prefill=1 decode=1\nfail wire r#0\nsubmit r to=prefill-0", "request 'r#0'"),
    ("cluster\nhold step\nrestart unified-0\nrelease commit", "commit is not held"),
    ("cluster\nhold step\nkill unified-0\nrelease step\nrelease step", "step is not held"),
    ("cluster loss=1", "loss= is a chance: 0 or more, and less than 1"),
    ("cluster depth=3", "depth= is 1 or 2"),
    ("cluster pages=0", "pages= is at least 1"),
    ("cluster ranks=0", "ranks= is at least 1"),
    ("cluster ranks=3\nkill rank unified-0 0", "unknown follower '0' (known: 1, 2)"),
    ("cluster ranks=3\nkill rank unified-0 1\nkill rank unified-0 2", "unified-0 is dead already"),
    ("cluster chunks=4", "'cluster' has no option 'chunks' (did you mean 'chunk'?)"),
    ("cluster prefix_cache=yes", "prefix_cache=yes: one of on, off is wanted"),
    ("cluster store_latency=1ms", "store_latency= needs store=on"),
    ("cluster waiting_timeout=0ms", "waiting_timeout= is longer than 0"),
]


@pytest.mark.parametrize(("text", "message"), CLUSTERS, ids=[text for text, _ in CLUSTERS])
def test_a_cluster_that_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        run_text(text, "some.scenario")
    assert message in str(caught.value)


def test_a_file_is_skipped_for_what_it_requires_and_says_why() -> None:
    outcome = run_text("requires pd grammar\ncluster\n", "g.scenario")
    assert outcome.skipped.startswith("requires grammar: ")
    assert not run_text("requires unified\ncluster\n", "u.scenario").skipped
    late = run_text("cluster\nrequires routr\n", "r.scenario")
    assert late.skipped == "requires routr: no feature of this engine (did you mean 'router'?)"


def test_comments_blank_lines_quotes_and_escapes() -> None:
    text = (
        "# a comment\n\n"
        "cluster unified=1   # another\n"
        '  submit r1 stop="a # b \\"c\\" \\n" prompt=3 stream\n'
        "expect r1#0 tokens=3\n"
    )
    cluster, submit, expect = parse(text, "f")
    assert (cluster.line, submit.line, expect.line) == (3, 4, 5)
    assert submit.options == {"stop": 'a # b "c" \n', "prompt": Span(3, 3)}
    assert submit.flags == {"stream"}
    assert expect.words == ("r1#0",)


def test_values_have_the_types_of_the_vocabulary() -> None:
    text = (
        CLUSTER + "submit r1 prompt=3..5 prefix=A:2..4 stop=@2..3 stop_token_ids=7,@1 deadline=2.5s"
    )
    (_, submit) = parse(text, "f")
    assert submit.options == {
        "prompt": Span(3, 5),
        "prefix": Prefix("A", Span(2, 4)),
        "stop": Golden(2, 3),
        "stop_token_ids": (7, Golden(1, 1)),
        "deadline": 2_500_000,
    }


@pytest.mark.parametrize(
    ("text", "duration"),
    [("0", 0), ("100us", 100), ("2.5s", 2_500_000), ("1m", 60_000_000), ("1h", 3_600_000_000)],
)
def test_durations(text: str, duration: int) -> None:
    (_, submit) = parse(CLUSTER + f"submit r1 timeout={text}", "f")
    assert submit.options == {"deadline": duration}


def test_other_names_of_deadlines() -> None:
    (cluster,) = parse("cluster unified=1 waiting=2s running_deadline=3s", "f")
    assert cluster.options == {
        "unified": 1,
        "waiting_timeout": 2_000_000,
        "running_timeout": 3_000_000,
    }


def test_loops_nest_and_count_from_one() -> None:
    text = CLUSTER + "repeat 2 a\nrepeat {a}\nsubmit r{a}.{i}\nend\nend"
    assert [command.words for command in parse(text, "f")[1:]] == [
        ("r1.1",),
        ("r2.1",),
        ("r2.2",),
    ]


def test_a_loop_that_would_fill_memory_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="expands to more than"):
        parse(CLUSTER + "repeat 1000\nrepeat 1000\nstep unified-0\nend\nend", "f")
