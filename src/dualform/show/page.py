"""How the report looks: light and dark, wide and narrow."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5a5a5a; --paper: #fff; --card: #f5f5f2; --line: #d8d8d2;
  --plus: #0072b2; --minus: #d55e00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececea; --soft: #a9a9a4; --paper: #161616; --card: #222220; --line: #3a3a38;
    --plus: #56b4e9; --minus: #e69f00 }
  img { filter: invert(1) }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 52rem; margin: 0 auto; padding: 1.2rem 1rem 3rem }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { font-size: 1.25rem; margin: 0 0 .6rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem }
section { background: var(--card); border-radius: .7rem; padding: 1.1rem; margin: 1.2rem 0 }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem 1.2rem; margin: 0 }
.facts div { border-top: 2px solid var(--line); padding-top: .3rem }
dt { color: var(--soft); font-size: .85rem }
dd { margin: 0; font-weight: 600 }
img { image-rendering: pixelated; border: 1px solid var(--line); border-radius: .3rem; background: #fff }
.asked { display: flex; gap: 1.1rem; align-items: center; flex-wrap: wrap }
.asked > div { flex: 1 1 12rem }
.asked p { margin: .1rem 0 .4rem }
.hits { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.3rem, 1fr)); gap: .8rem .4rem }
figure { margin: 0; text-align: center }
figure img { width: 100%; max-width: 84px; height: auto }
figcaption { font-size: .8rem; line-height: 1.35; color: var(--soft) }
figcaption b { display: block; font-size: 1rem; color: var(--ink) }
figcaption span { display: block }
.odds { list-style: none; margin: 0; padding: 0 }
.odds li { display: grid; grid-template-columns: 1.2rem 1fr 4.6rem; gap: .5rem; align-items: center }
.odds i { height: .7rem; background: var(--plus); border-radius: .2rem; min-width: 1px }
.odds b { text-align: right; font-weight: 500; font-variant-numeric: tabular-nums }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .4rem 2rem }
.beside p { margin: 0; color: var(--soft); font-size: .9rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .22rem .4rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child { text-align: left }
tbody th { font-weight: 400 }
thead th { color: var(--soft); font-weight: 500 }
.sum th, .sum td { font-weight: 700 }
td:has(.bar) { width: 40% }
@media (max-width: 30rem) { td:has(.bar) { width: 22% } }
.bar { position: relative; height: .8rem; min-width: 3.5rem }
.bar::before { content: ""; position: absolute; left: 50%; height: 100%; border-left: 1px solid var(--line) }
.bar i { position: absolute; height: 100%; border-radius: .15rem }
.plus { left: 50%; background: var(--plus); fill: var(--plus) }
.minus { right: 50%; background: var(--minus); fill: var(--minus) }
svg { width: 100%; height: auto; display: block }
svg line { stroke: var(--ink) }
.note { color: var(--soft); font-size: .88rem; margin: .5rem 0 0 }
code { font-family: ui-monospace, monospace; font-size: .95em }
"""

PAGE = f"""<!doctype html>
<html lang=en>
<head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1"><title>{{title}}</title>
<style>{STYLE}</style></head>
<body><main>{{body}}</main></body>
</html>
"""

READING = """<h2>How to read the numbers</h2>
<p>A contribution is exact for the last layer: it is what the change that one training image made to the weights in one
step adds to the number at hand. Large contributions of both signs are normal, as training pushes and pulls at the same
weights many times; only their sum is the prediction.</p>
<p><em>Exact is not counterfactual</em>: what training without an image would have given is another question.</p>"""
