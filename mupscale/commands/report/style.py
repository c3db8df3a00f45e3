"""How the page of a report looks: on a wide screen, on a phone, printed; light and dark."""

STYLE = """
:root { --paper: #fff; --ink: #1c2026; --soft: #5d6570; --line: #e3e6ea; --tint: #f5f6f8; --warn: #8a5a00; --warn-tint: #fff6e0; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181d; --ink: #dfe3e8; --soft: #9aa3ae; --line: #2c3138; --tint: #1d2127; --warn: #f0c674; --warn-tint: #2a2416; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
.kicker { margin: 0; color: var(--soft); font-size: .8rem; letter-spacing: .08em; text-transform: uppercase; }
h1 { margin: .1rem 0 1.2rem; font-size: clamp(1.5rem, 4.5vw, 2.2rem); line-height: 1.2; text-wrap: balance; }
h2 { margin: 2.8rem 0 .8rem; font-size: 1.25rem; }
p { margin: .5rem 0; max-width: 75ch; }
.verdict { font-size: 1.08rem; margin: 0 0 .9rem; }
.verdict strong { display: block; font-weight: 650; }
.fine { color: var(--soft); font-size: .86rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.tile { background: var(--tint); border-left: 4px solid var(--c, var(--line)); border-radius: 6px; padding: .7rem .9rem; }
.tile span, .tile small { display: block; color: var(--soft); font-size: .82rem; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 1.65rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.key { white-space: nowrap; margin-right: .8rem; }
.key::before { content: ""; display: inline-block; width: .75em; height: .75em; margin-right: .4em; background: var(--c); }
td .key { margin: 0; }
aside { background: var(--warn-tint); color: var(--warn); border-radius: 6px; padding: .3rem 1rem; font-size: .9rem; }
aside li { overflow-wrap: anywhere; }
aside ul { padding-left: 1.1rem; margin: .5rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; align-items: start; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
img { display: block; width: 100%; max-width: 720px; height: auto; margin: 0 auto; }
.wide img { max-width: none; }
img.white { background: #fff; border-radius: 6px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem 1.1rem .38rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; }
th { color: var(--soft); font-weight: 550; }
th.n, td.n { text-align: right; }
table.code td { white-space: normal; font: .82rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
pre { background: var(--tint); border-radius: 6px; padding: .8rem 1rem; overflow-x: auto; }
pre { font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
@media (max-width: 600px) {
  main { padding: 1.4rem 1rem 3rem; }
  th, td { padding-right: .7rem; }
  td:first-child { white-space: normal; }
}
@media print {
  main { max-width: none; padding: 0; }
  body { font-size: 11pt; }
  .figures { grid-template-columns: 1fr 1fr; }
  .scroll, pre { overflow: visible; white-space: pre-wrap; }
  h2 { break-after: avoid; }
}
"""
