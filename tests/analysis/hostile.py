"""Names that nobody would give to a task in earnest. `URL` is where they would report to, if they ran."""

from __future__ import annotations

RUN = "document.documentElement.dataset.hacked=1;fetch('URL')"

NAMES = (
    f"<script>{RUN}</script>",
    f"</title><script>{RUN}</script>",
    f"</style><script>{RUN}</script>",
    f"--></textarea></svg></math><script>{RUN}</script>",
    "<script src=URL></script>",
    f'<img src=x onerror="{RUN}">',
    "<img src=URL>",
    f'"><svg onload="{RUN}">',
    f"'><body onload='{RUN}'>",
    f'" onmouseover="{RUN}" autofocus onfocus="{RUN}" tabindex="1',
    f'<a href="javascript:{RUN}" id=x>x</a><script>x.click()</script>',
    f"javascript:{RUN}",
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    "<iframe src=URL></iframe>",
    "<link rel=stylesheet href=URL>",
    "<meta http-equiv=refresh content='0;url=URL'>",
    "<base href=URL/>",
    "<form action=URL><input type=submit autofocus></form>",
    "<object data=URL></object><embed src=URL><video src=URL autoplay></video>",
    "} body { background: url(URL) } @import 'URL'; /*",
    "</style><style>@import url(URL);</style>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=1&gt;'>",
    "{{7*7}} ${7*7} <%= 7*7 %> #{7*7}",
    "&lt;script&gt; &amp; &#60;b&#62; &nbsp;",
    "<b>bold</b> <!-- comment -->",
    "\u202ereversed\u202c and \u2066isolated\u2069",
    "nul \x00 escape \x1b[31mred\x1b[0m bell \x07 delete \x7f",
    "half a pair \ud800",
    "a name " + "that does not end " * 60,
    "no" + "break" * 300,
    "[red]markup[/red] [/] :boom:",
    "$x^2$ a_b^{ $\\frac \\undefined$ %s {0} %(x)s",
    '=HYPERLINK("URL") ,;\t\n\r"\'`\\',
    "ﬁ 名前 שם 🦆",
)


def names(url: str) -> list[str]:
    """All of them, reporting to an address."""
    return [name.replace("URL", url) for name in NAMES]
