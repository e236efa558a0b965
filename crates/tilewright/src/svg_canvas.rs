//! SVG primitives and colors. Coordinates are pixels from the upper left corner.

use std::fmt::Write as _;

/// Ten distinct colors, mostly distinguishable with color vision deficiency (after Tableau 10).
const COLOURS: [u32; 10] =
    [0x4e79a7, 0xf28e2b, 0x59a14f, 0xe15759, 0x76b7b2, 0xedc948, 0xb07aa1, 0x9c755f, 0xff9da7, 0x8c96a8];

const STYLE: &str = "\
<style>
text { font-family: system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, sans-serif; font-size: 12px; fill: #333 }
.title { font-size: 20px; font-weight: 600; fill: #111 }
.heading { font-size: 14px; font-weight: 600; fill: #111 }
.quiet { fill: #777 }
.item { stroke: #fff; stroke-width: 1 }
.overhead { fill: #000; fill-opacity: 0.28 }
.partial { fill: url(#hatch) }
.grid { stroke: #e4e4e4; stroke-width: 1 }
.mean { stroke: #111; stroke-width: 1.2; stroke-dasharray: 5 4 }
</style>
<defs>
<pattern id=\"hatch\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">
<path d=\"M0 0H7V7H0Z\" fill=\"#fff\" fill-opacity=\"0.4\"/>
<path d=\"M0 0H2.4V7H0Z\" fill=\"#fff\" fill-opacity=\"0.45\"/>
</pattern>
</defs>
";

/// Alignment of text relative to its position.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the values of `text-anchor`")]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// A position.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Distance from the left.
    pub x: f64,
    /// Distance from the top.
    pub y: f64,
}

/// A rectangle.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the attributes of `rect`")]
pub struct Area {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

/// An SVG under construction.
#[derive(Debug, Default)]
pub struct Canvas {
    shapes: String,
}

impl Canvas {
    /// A filled rectangle with a class and a tooltip.
    pub fn rect(&mut self, area: Area, class: &str, colour: u32, tip: &str) {
        let Area { x, y, width, height } = area;
        let _ = writeln!(
            self.shapes,
            "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" \
             fill=\"#{colour:06x}\"><title>{}</title></rect>",
            escaped(tip)
        );
    }

    /// An overlay that ignores the pointer.
    pub fn cover(&mut self, area: Area, class: &str) {
        let Area { x, y, width, height } = area;
        let _ = writeln!(
            self.shapes,
            "<path class=\"{class}\" pointer-events=\"none\" d=\"M{x:.2} {y:.2}h{width:.2}v{height:.2}h-{width:.2}z\"/>"
        );
    }

    /// A line of a class.
    pub fn line(&mut self, from: Point, to: Point, class: &str) {
        let _ = writeln!(
            self.shapes,
            "<line class=\"{class}\" x1=\"{:.2}\" y1=\"{:.2}\" x2=\"{:.2}\" y2=\"{:.2}\"/>",
            from.x, from.y, to.x, to.y
        );
    }

    /// Text with its baseline at `y` and further attributes.
    pub fn text(&mut self, Point { x, y }: Point, anchor: Anchor, attributes: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.shapes,
            "<text x=\"{x:.2}\" y=\"{y:.2}\" text-anchor=\"{anchor}\" {attributes}>{}</text>",
            escaped(text)
        );
    }

    /// The whole file.
    pub fn finish(self, width: f64, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\">\n{STYLE}\
             <path d=\"M0 0H{width:.0}V{height:.0}H0Z\" fill=\"#fff\"/>\n{}</svg>\n",
            self.shapes
        )
    }
}

/// Upper estimate of the width of `text` in pixels; fonts differ.
pub fn text_width(text: &str) -> f64 {
    7.2 * text.chars().count() as f64
}

/// The color of a request; later requests reuse the ten colors in lighter and darker shades.
pub fn colour(request: usize) -> u32 {
    let colour = COLOURS[request % COLOURS.len()];
    let shade = |shift: u32| {
        let channel = colour >> shift & 0xff;
        let shaded = match request / COLOURS.len() % 3 {
            0 => channel,
            1 => channel + (255 - channel) / 3,
            _ => channel - channel / 3,
        };
        shaded << shift
    };
    shade(16) | shade(8) | shade(0)
}

/// A style attribute with a text color readable on `colour`.
pub fn ink(colour: u32) -> &'static str {
    let brightness = 299 * (colour >> 16 & 0xff) + 587 * (colour >> 8 & 0xff) + 114 * (colour & 0xff);
    if brightness < 125_000 { "style=\"fill:#fff\"" } else { "style=\"fill:#111\"" }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
