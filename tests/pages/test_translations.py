"""Each page in English is there in Chinese, and the other way round, and both say the same."""

import pytest
from support.python_process import ROOT
from support.translations import broken_links, differences, pairs, read_page

PAIRS = pairs(ROOT)
EXISTING = [(english, chinese) for english, chinese in PAIRS if english.exists() and chinese.exists()]


@pytest.mark.parametrize("english, chinese", PAIRS, ids=[english.stem for english, _ in PAIRS])
def test_page_is_there_in_both_languages(english, chinese):
    assert english.exists(), f"{english} is missing, of which {chinese} is a translation"
    assert chinese.exists(), f"{chinese} is missing, the translation of {english}"


@pytest.mark.parametrize("english, chinese", EXISTING, ids=[english.stem for english, _ in EXISTING])
def test_both_languages_say_the_same(english, chinese):
    assert not (found := differences(read_page(english), read_page(chinese))), "\n".join(found)


@pytest.mark.parametrize("page", [page for pair in EXISTING for page in pair], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    assert not (found := broken_links(read_page(page))), "\n".join(found)


ENGLISH = """# A scale

[中文](zh/scale.md)

## Why 2 of them?

Of 1,000 steps `Model` makes 3 at 0.5, see [the update rule](#the-update-rule) and [the README](../README.md).
Two networks have 25.6 million weights.

| step | scale |
|---|---:|
| 1 | `2.0` |

## The update rule

- It **doubles**.

```py
scale = 2 * scale  # twice
```

    2.0

    scale ──┬── 2
"""

CHINESE = """# 损失缩放系数

[English](../scale.md)

## 为什么有2个？

1,000步中，有3步由 `Model` 以0.5运行，参见[README](../../README_CN.md)和[更新规则](#更新规则)。2个网络共有2560万个权重。

| 步 | 损失缩放系数 |
|---|---:|
| 1 | `2.0` |

## 更新规则

- **加倍**

```py
scale = 2 * scale  # twice
```

    2.0

    scale ──┬── 2
"""  # noqa: RUF001


@pytest.fixture
def pages(tmp_path):
    """Writes a page in both languages, and empty READMEs beside it, and reads it; give it what to change in Chinese."""

    def written(old, new):
        (tmp_path / "docs" / "zh").mkdir(parents=True)
        for name in ("README.md", "README_CN.md"):
            (tmp_path / name).touch()
        assert old in CHINESE
        result = []
        for folder, text in (("docs", ENGLISH), ("docs/zh", CHINESE.replace(old, new, 1))):
            path = tmp_path / folder / "scale.md"
            path.write_text(text, encoding="utf-8")
            result.append(read_page(path))
        return result

    return written


@pytest.mark.parametrize(
    "old, new", [("# twice", "# 两倍"), ("scale ──┬── 2", "损失缩放系数 ───┬── 2"), ("scale ──┬── 2", "系数 ──┬── 二")]
)
def test_comments_and_the_words_of_a_diagram_may_be_chinese(pages, old, new):
    assert differences(*pages(old, new)) == []


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("[English]", "[英文]", "scale.md:3: the third line must be [English](../scale.md)"),
        ("## 更新规则", "### 更新规则", "scale.md:13 is h3, where "),
        ("- **加倍**\n", "", "scale.md:16 is code, where "),
        ("\n    2.0\n\n    scale ──┬── 2\n", "", "scale.md ends, where "),
        ("| 1 | `2.0` |\n", "| 1 | `2.0` |\n| 2 | `4.0` |\n", "scale.md:12 is tr, where "),
        ("|---:|", "|---|", "scale.md:9 is th, where "),
        ("# twice", "# double", "this code differs"),
        ("2 * scale  # twice", "4 * scale  # 四倍", "this code differs"),
        ("  # twice", "", "this code differs"),
        ("scale ──┬── 2", "系数 ──┴── 二", "this code differs"),
        ("```py", "```python", "this code differs"),
        ("    2.0", "    2.1", "this code differs"),
        ("有3步", "有三步", "figures: missing ['3'], added []"),
        ("2560万", "2560亿", "figures: missing ['25600000'], added ['256000000000']"),
        ("2个网络", "3个网络", "figures: missing [], added ['3']"),
        ("1,000", "1000", "figures: missing ['1,000'], added ['1000']"),
        ("有2个", "有几个", "figures: missing ['2'], added []"),
        ("| 1 |", "| 2 |", "figures: missing ['1'], added ['2']"),
        ("`Model`", "Model", "inline code: missing ['Model'], added []"),
        ("`2.0`", "`2.0` `1`", "inline code: missing [], added ['1']"),
        ("**加倍**", "**加倍", "emphasis: missing ['strong'], added []"),
        ("../../README_CN.md", "../../README.md", "README.md']"),
        ("#更新规则", "#为什么有2个", "scale.md heading 2']"),
        ("[更新规则](#更新规则)", "更新规则", "links: missing "),
    ],
)
def test_a_difference_is_told(pages, old, new, message):
    (found,) = differences(*pages(old, new))
    assert message in found
