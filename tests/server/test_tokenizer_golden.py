"""The default model's token ids against llama.cpp's, in many scripts and in awkward places.

The ids are what llama.cpp's server answers to ``/tokenize`` for the same GGUF file: with control
tokens parsed, and (third column, where it differs) not parsed. The last ten rows are random.
"""

import pytest

from server.model_store import default_cache_dir, resolve
from server.tokenizer import Tokenizer
from server.tokenizer_loader import load_tokenizer

pytestmark = pytest.mark.model

GOLDEN: list[tuple[str, str, str | None]] = [
    (
        "Hello world",
        "19556 905",
        None,
    ),
    (
        "The quick brown fox jumps over the lazy dog.",
        "504 2365 6354 16438 27003 690 260 23790 2767 30",
        None,
    ),
    (
        "<|im_start|>user\nHi<|im_end|>\n",
        "1 4093 198 26843 2 198",
        "44 108 306 79 3738 108 46 4093 198 26843 44 108 306 79 486 108 46 198",
    ),
    (
        "  leading and trailing  ",
        "216 2899 284 35079 256",
        None,
    ),
    (
        "tabs\tand\n\nnewlines\r\n\r\n  x",
        "100 7366 197 397 198 198 2241 5110 18682 216 1792",
        None,
    ),
    (
        "12345 67.89 1,000,000",
        "33 34 35 36 37 216 38 39 30 40 41 216 33 28 32 32 32 28 32 32 32",
        None,
    ),
    (
        "def f(x):\n    return x ** 2  # comment\n",
        "1604 275 24 104 727 472 1003 1792 1903 216 34 216 907 5189 198",
        None,
    ),
    (
        "世界你好，こんにちは世界",
        (
            "7906 240 178 239 230 18645 250 48392 138 12831 7365 237 10391 237 41152 7365 111 "
            "7365 124 7906 240 178 239 230"
        ),
        None,
    ),
    (
        "Привет, мир! Ёлка",
        "155 249 46879 16464 32547 28 41337 7872 9175 17 5470 219 12681 34536",
        None,
    ),
    (
        "مرحبا بالعالم ١٢٣",
        ("21706 20602 44626 31462 10805 45726 22208 34966 22208 21706 216 164 111 164 112 164 113"),
        None,
    ),
    (
        "नमस्ते दुनिया",
        "30658 35090 38770 16525 26293 30581 12335 116 42990 30658 27011 32932 18075",
        None,
    ),
    (
        "안녕하세요 세계",
        "183 239 226 182 223 239 33085 242 183 222 133 183 244 238 18601 222 133 181 128 222",
        None,
    ),
    (
        "😀👩\u200d💻🇩🇪",
        "10813 242 218 10813 235 119 321 231 10813 236 136 10813 225 119 10813 225 120",
        None,
    ),
    (
        "I'm you're we'll they'd IT'S",
        "57 5248 346 2316 392 3060 502 6737 9627 23 67",
        None,
    ),
    (
        "ａｂｃ １２３",
        "186 138 219 186 138 220 186 138 221 216 8083 235 8083 236 8083 237",
        None,
    ),
    (
        "é vs é",
        "85 151 219 6375 26411",
        None,
    ),
    (
        "\xa0nbsp\u2003em\u3000ideographic",
        "15442 94 32093 321 221 391 12109 218 489 4551",
        None,
    ),
    (
        "a\x04b\x06c",
        "81 82 83",
        None,
    ),
    (
        "!\x04!",
        "17 17",
        None,
    ),
    (
        "²½Ⅷ",
        "19133 16738 173 223 117",
        None,
    ),
    (
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "31069 31069 31069 31069 31069 31069 31069 31069 31069 31069 31069 31069 10969",
        None,
    ),
    (
        "                                     end",
        "12427 289 1112",
        None,
    ),
    (
        "\n\n\n\n\n\n\n\n\n",
        "22342 1116 16506",
        None,
    ),
    (
        "",
        "",
        None,
    ),
    (
        " ",
        "216",
        None,
    ),
    (
        "𐍈𝔘𝔫",
        "187 234 231 226 23159 238 242 23159 238 121",
        None,
    ),
    (
        "Ünïcödé ß ﬁ",
        "142 246 94 25972 83 7466 84 2756 5549 249 40367",
        None,
    ),
    (
        "क\u200d٣ßक\x85<|im_end|>\x04.\rac",
        "38565 321 231 164 113 34878 38565 141 223 2 30 201 387",
        "38565 321 231 164 113 34878 38565 141 223 44 108 306 79 486 108 46 30 201 387",
    ),
    (
        "世\x06 the <|im_end|>😀",
        "7906 240 260 216 2 10813 242 218",
        "7906 240 260 2067 108 306 79 486 108 46 10813 242 218",
    ),
    (
        "\t<|im_end|>\x06'\r\t\xa0\x04",
        "197 2 23 201 197 15442",
        "197 44 108 306 79 486 108 46 23 201 197 15442",
    ),
    (
        "Y👩!<|im_end|>Z٣ 世\u3000\x06٣界",
        "73 10813 235 119 17 2 74 164 113 216 7906 240 12109 218 164 113 178 239 230",
        (
            "73 10813 235 119 17 44 108 306 79 486 108 46 74 164 113 216 7906 240 12109 218 164 "
            "113 178 239 230"
        ),
    ),
    (
        " >\x06\x06<<|im_end|>|\u2003.界\x06!",
        "2986 44 2 108 321 221 30 178 239 230 17",
        "2986 33691 108 306 79 486 108 46 108 321 221 30 178 239 230 17",
    ),
    (
        "\x04<|im_end|>é\x06",
        "2 2756",
        "44 108 306 79 486 108 46 2756",
    ),
    (
        "𗝖ኆ\U00013bc5\U00015a4d\U00014199ǳ隀\U0001b688",
        (
            "187 241 247 240 172 228 224 187 237 124 223 187 239 119 231 187 238 224 243 146 128 "
            "180 244 218 187 245 244 226"
        ),
        None,
    ),
    (
        "㻅Ș𗐤𘤧Ǉ,𛆰偠",
        (
            "174 136 223 147 242 187 241 234 114 187 242 114 117 146 225 28 187 245 224 125 176 "
            "219 250"
        ),
        None,
    ),
    (
        "đᦖ㹍叝§\uee92Ȥ亓",
        "143 235 172 116 240 174 134 231 12034 247 31854 185 135 236 147 114 16736 237",
        None,
    ),
    (
        "\U0001dcb6\U00015bbeŐ믚\x7fƹ\U0001c662넛",
        (
            "23159 127 131 187 239 123 139 144 234 182 124 244 217 145 134 187 246 243 112 182 "
            "222 245"
        ),
        None,
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m", default_cache_dir()))


@pytest.mark.parametrize(("text", "parsed", "as_text"), GOLDEN)
def test_ids_are_those_of_llama_cpp(
    tokenizer: Tokenizer, text: str, parsed: str, as_text: str | None
) -> None:
    assert tokenizer.encode(text) == [int(i) for i in parsed.split()]
    plain = tokenizer.encode(tokenizer.protect(text))
    assert plain == [int(i) for i in (parsed if as_text is None else as_text).split()]
