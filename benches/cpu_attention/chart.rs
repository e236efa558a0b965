//! SVG chart of a record: speedup over torch, one bar per case and form.
//!
//! ```text
//! decode.8x4096.bf16   ██████████┃███████████ 3.65      ┃ as fast as torch
//!          (as rows)   ██████████┃█████ ╎ 1.58          ╎ expected
//! ```

use std::fmt::Write as _;

/// Layout in pixels: start of the bars, longest bar, row height, top of the bars.
const LEFT: f64 = 250.0;
const BARS: f64 = 480.0;
const ROW: f64 = 26.0;
const TOP: f64 = 64.0;

/// One comparison with torch.
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) speedup: f64,
    pub(crate) expected: Option<f64>,
}

/// The SVG file.
pub(crate) fn draw(subtitle: &str, bars: &[Bar]) -> String {
    let most = bars.iter().map(|bar| bar.speedup.max(bar.expected.unwrap_or(1.0))).fold(1.0, f64::max);
    let x = |speedup: f64| LEFT + BARS * speedup / most;
    let (width, bottom) = (LEFT + BARS + 70.0, TOP + ROW * bars.len() as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\" font-weight=\"bold\">Attention on the CPU: times as fast as torch</text>\n\
         <text x=\"12\" y=\"42\" fill=\"#555555\">{}</text>\n",
        bottom + 34.0,
        escaped(subtitle)
    );
    for (at, bar) in bars.iter().enumerate() {
        let y = TOP + ROW * at as f64;
        let colour = if bar.speedup >= bar.expected.unwrap_or(1.0) { "#2f6f9f" } else { "#c0653a" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"16\" fill=\"{colour}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{:.2}</text>",
            LEFT - 8.0,
            y + 17.0,
            escaped(&bar.label),
            y + 5.0,
            x(bar.speedup) - LEFT,
            x(bar.speedup).max(bar.expected.map_or(0.0, x)) + 6.0,
            y + 17.0,
            bar.speedup
        );
        if let Some(expected) = bar.expected {
            svg += &line(x(expected), (y + 2.0, y + 24.0), " stroke-dasharray=\"3 2\"");
        }
    }
    svg += &line(x(1.0), (TOP, bottom), "");
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">torch</text>\n\
         <text x=\"12\" y=\"{:.1}\" fill=\"#555555\">dashed: expected; orange: less than that, or than torch</text>\n</svg>",
        x(1.0),
        bottom + 18.0,
        bottom + 18.0
    );
    svg
}

fn line(x: f64, (from, to): (f64, f64), more: &str) -> String {
    format!("<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from:.1}\" y2=\"{to:.1}\" stroke=\"#222222\"{more}/>\n")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
