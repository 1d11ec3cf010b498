"""A profile as a picture: a bar a step, the dark part of it what the machine's limits allow."""

from __future__ import annotations

from html import escape

from tessella.runtime.profiler import Profile, StepTime, summary

ROW, TOP, BOTTOM, LEFT, WIDTH, RIGHT = 16, 84, 20, 330, 960, 150  # pixels; LEFT: names
COLOURS = {"arithmetic": ("#0b6e99", "#9fcadd"), "memory": ("#8a5a00", "#e8cf9f")}
NAME = 46  # letters of a name


def svg(profile: Profile) -> str:
    """The steps from top to bottom in the order in which they run, as an SVG document."""
    steps = profile.steps
    longest_us = max((max(s.time_us, s.in_run_us or 0.0) for s in steps), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / max(longest_us, 1e-3)
    height = TOP + ROW * len(steps) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="14" y="22" font-size="14">{escape(profile.plan[:70])}, '
        f"{escape(profile.limits.device)}</text>",
        f'<text x="14" y="42" fill="#555">{escape(summary(profile))}</text>',
        *_legend(any(s.in_run_us is not None for s in steps)),
    ]
    for index, step in enumerate(steps):
        parts += _row(step, TOP + ROW * index, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend(in_run: bool) -> list[str]:
    parts, x = [], 14
    for bound, (dark, light) in COLOURS.items():
        parts += [
            f'<rect x="{x}" y="54" width="16" height="10" fill="{dark}"/>',
            f'<rect x="{x + 16}" y="54" width="16" height="10" fill="{light}"/>',
            f'<text x="{x + 38}" y="63">limited by {bound}</text>',
        ]
        x += 170
    line = "; line: inside a run of the whole program" if in_run else ""
    text = f"dark: what the machine allows{line}"
    return [*parts, f'<text x="{x}" y="63" fill="#555">{text}</text>']


def _row(step: StepTime, y: int, scale: float) -> list[str]:
    dark, light = COLOURS[step.bound]
    whole, least = scale * step.time_us, scale * min(step.least_us, step.time_us)
    name = step.layer or step.step
    name = name if len(name) <= NAME else f"…{name[1 - NAME :]}"
    middle, end = y + ROW - 5, LEFT + scale * max(step.time_us, step.in_run_us or 0.0)
    rate = "" if step.peak_share is None else f", {100 * step.peak_share:.0f} % of peak"
    parts = [
        f"<g><title>{escape(step.step)}: {escape(step.kernel)}</title>",
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(name)}'
        f' <tspan fill="#888">{escape(step.op)}</tspan></text>',
        f'<rect x="{LEFT}" y="{y + 2}" width="{whole:.2f}" height="{ROW - 4}" fill="{light}"/>',
        f'<rect x="{LEFT}" y="{y + 2}" width="{least:.2f}" height="{ROW - 4}" fill="{dark}"/>',
        f'<text x="{end + 6:.1f}" y="{middle}">{step.time_us:,.1f} µs'
        f'<tspan fill="#888">{rate}</tspan></text>',
    ]
    if step.in_run_us is not None:
        at = LEFT + scale * step.in_run_us
        parts.append(
            f'<line x1="{at:.1f}" y1="{y + 1}" x2="{at:.1f}" y2="{y + ROW - 1}" stroke="#333"/>'
        )
    return [*parts, "</g>"]
