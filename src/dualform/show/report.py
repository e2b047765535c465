"""One page that shows what some predictions are made of: a single file that needs nothing else, for any screen."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jaxtyping import Float, UInt8
from torch import Tensor

from dualform.explain import Certificate, Groups, Hits, Timeline

from .page import PAGE, READING
from .words import MASKED, parts, plain, same_digits


@dataclass(frozen=True)
class Asked:
    """One image that the network was asked about. ``query`` is its place in the answers, which may hold several."""

    title: str
    picture: UInt8[Tensor, "height width"]
    label: int
    query: int
    logits: Float[Tensor, " classes"]
    hits: Hits
    groups: Groups
    recalled: Groups
    line: Timeline
    masked: str
    masked_logits: Float[Tensor, " classes"]

    @property
    def predicted(self) -> int:
        """The class with the largest logit."""
        return int(self.logits.argmax())


def write_report(
    file: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    certificate: Certificate,
    asked: Sequence[Asked],
    images: UInt8[Tensor, "N height width"],
) -> None:
    """Write the page. ``images`` are the training images, found by the noted column ``index``."""
    told = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items())
    sections = [_certificate(certificate), *(_asked(each, images) for each in asked), READING]
    body = f"<h1>{escape(title)}</h1><dl class=facts>{told}</dl>" + "".join(
        f"<section>{each}</section>" for each in sections
    )
    file.write_text(PAGE.replace("{title}", escape(title)).replace("{body}", body), encoding="utf-8")


def png(image: UInt8[Tensor, "height width"]) -> str:
    """A grey picture as a data address: ink on paper, so 255 is black."""
    height, width = image.shape
    rows = b"".join(b"\0" + bytes(255 - value for value in row) for row in image.tolist())
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows, 9)), _chunk(b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _certificate(certificate: Certificate) -> str:
    rows = [[name, f"{error:.1e}", f"{certificate.floor[name]:.1e}"] for name, error in certificate.items()]
    return f"""<h2>Does the memory explain the weights?</h2>
<p>Each parameter was rebuilt from the recorded training alone and compared with the trained one, entry by entry. The
rounding floor is what the arithmetic of training leaves anyway.</p>
{_table(["parameter", "‖W − rebuilt‖ / ‖W − W₀‖", "rounding floor"], rows)}"""


def _asked(asked: Asked, images: Tensor) -> str:
    verdict = "which is right" if asked.predicted == asked.label else f"but it is a {asked.label}"
    return f"""<h2>{escape(asked.title)}</h2>
<div class=asked><img src="{png(asked.picture)}" alt="the test image, a handwritten {asked.label}" width=112 height=112>
<div><p><strong>The network says {asked.predicted}</strong>, {verdict}.</p>{_odds(asked.logits)}</div></div>
<h3>The training images that add most to {escape(asked.hits.target)}</h3>
<div class=hits>{_hits(asked, images)}</div>
<h3>All training images together, by {escape(asked.groups.column)}</h3>
{_totals(asked)}
<h3>When it was learned</h3>
{_timeline(asked)}
<h3>What if: without the visits where <code>{escape(asked.masked)}</code></h3>
<div class=beside><div><p>as trained</p>{_odds(asked.logits)}</div>
<div><p>with the mask</p>{_odds(asked.masked_logits)}</div></div>
<p class=note>{escape(MASKED)}</p>"""


def _odds(logits: Float[Tensor, " classes"]) -> str:
    """The three likeliest classes."""
    best = logits.double().softmax(0).topk(min(3, len(logits)))
    lines = [
        f"<li><span>{k}</span><i style='width:{100 * p:.1f}%'></i><b>{100 * p:.1f} %</b></li>"
        for k, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return f"<ul class=odds>{''.join(lines)}</ul>"


def _hits(asked: Asked, images: Tensor) -> str:
    rows = list(asked.hits[asked.query])
    figures = []
    for hit, add in zip(rows, same_digits(hit.contribution for hit in rows), strict=True):
        about = [f"weight {hit.weight:.3g}", f"label {hit.label}", f"image {hit.index}", f"step {hit.step}"]
        alt = f"training image {hit.index}, labelled {hit.label}"
        below = "".join(f"<span>{each}</span>" for each in about)
        picture = f'<img src="{png(images[hit.index])}" alt="{alt}" width=84 height=84>'
        figures.append(f"<figure>{picture}<figcaption><b>{_minus(add)}</b>{below}</figcaption></figure>")
    return "".join(figures)


def _totals(asked: Asked) -> str:
    """Every part of the sum as a line with its bar, and the check that they sum to the whole."""
    groups, query = asked.groups, asked.query
    assert groups.total is not None and groups.residual is not None
    names = [f"{groups.column} {name}" for name in groups.names]
    values, sizes = groups.values[query].tolist(), [plain(size) for size in asked.recalled.values[query].tolist()]
    for name, value in [*list(parts(groups, query).items())[1:], ("sum of all", float(groups.total[query]))]:
        names, values, sizes = [*names, name], [*values, value], [*sizes, ""]
    largest = max(map(abs, values)) or 1.0
    rows = [
        [escape(name), _bar(value / largest), _minus(text), size]
        for name, value, text, size in zip(names, values, same_digits(values), sizes, strict=True)
    ]
    return f"""{_table(["part", "", "adds to the logit", "attention Σ|α|"], rows, last=True)}
<p class=note>The parts sum to {_minus(f"{values[-1]:+.4f}")}, which is all that layer {escape(groups.layer)} adds to
{escape(groups.target)}; they leave a residual of {_minus(f"{float(groups.residual[query]):+.0e}")}.</p>"""


def _timeline(asked: Asked) -> str:
    """Bars over training: what images of the predicted class add, and what all others add."""
    values, names = asked.line.values[asked.query], asked.line.names
    own = values[[name == asked.predicted for name in names]].sum(0)
    others = values.sum(0) - own
    largest, wide = max(float(own.abs().max()), float(others.abs().max())) or 1.0, 600 / len(own)
    bars = [
        f"<rect class={kind} x={i * wide + 1:.1f} width={wide - 2:.1f} y={65 - max(h, 0):.1f} height={abs(h):.1f} />"
        for kind, series in (("plus", own), ("minus", others))
        for i, h in enumerate((60 * series / largest).tolist())
    ]
    first, last = int(asked.line.edges[0]), int(asked.line.edges[-1])
    sums = same_digits([float(own.sum()), float(others.sum())])
    says = _minus(f"images of class {asked.predicted} add {sums[0]} in all, all others {sums[1]}")
    return f"""<svg viewBox="0 0 600 130" role=img aria-label="From step {first} to step {last}: {says}">{"".join(bars)}
<line x1=0 x2=600 y1=65 y2=65 /></svg>
<p class=note>From step {first} (left) to step {last} (right), in {len(own)} stretches: {says}.</p>"""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], last: bool = False) -> str:
    """A table of ready cells; the first of a line is its name, and the ``last`` line a sum."""
    lines = []
    for i, (name, *cells) in enumerate(rows):
        kind = " class=sum" if last and i == len(rows) - 1 else ""
        told = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr{kind}><th scope=row>{name}</th>{told}</tr>")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _bar(share: float) -> str:
    kind, width = ("plus", 50 * share) if share >= 0 else ("minus", -50 * share)
    return f"<div class=bar><i class={kind} style='width:{width:.2f}%'></i></div>"


def _minus(text: str) -> str:
    return escape(text).replace("-", "−")
