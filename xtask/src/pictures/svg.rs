//! Drawing: rectangles and texts on a light ground, as SVG whose text is the same each time.
//!
//! All lengths are whole pixels, from the upper left corner.

use std::fmt::Write;

/// The widest that a picture may be.
pub(super) const WIDEST: usize = 900;

/// What is drawn on.
pub(super) struct Canvas {
    body: String,
    width: usize,
    height: usize,
}

/// A rectangle's left and upper edge, width and height.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// Colours that differ, light enough for dark text.
const PALETTE: [&str; 8] =
    ["#f6b8b3", "#f7cf9c", "#efe58f", "#c5e3a0", "#a3dfc8", "#a9d3f2", "#bfc2f5", "#e4bdeb"];

/// One of eight colours, and how strong it is in percent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Colour {
    index: usize,
    strength: usize,
}

impl Colour {
    /// One of eight, which then repeat.
    pub(super) fn of(index: usize) -> Self {
        Self { index: index % PALETTE.len(), strength: 100 }
    }

    /// That of a lane: four lanes side by side have one hue.
    pub(super) fn of_lane(lane: usize) -> Self {
        Self { strength: 55 + 15 * (lane % 4), ..Self::of(lane / 4) }
    }

    /// The same, hardly there.
    pub(super) fn faint(self) -> Self {
        Self { strength: 35, ..self }
    }
}

impl Canvas {
    /// An empty picture with a title and a line that explains it.
    pub(super) fn new((width, height): (usize, usize), title: &str, explained: &str) -> Self {
        assert!(width <= WIDEST, "a picture of {width} pixels is too wide");
        let mut canvas = Self { body: String::new(), width, height };
        canvas.rect(Area { x: 0, y: 0, width, height }, "#fcfcfa", "none");
        canvas.write((20, 30), "font-size=\"17\" font-weight=\"bold\"", title);
        canvas.write((20, 50), "font-size=\"12\" fill=\"#555\"", explained);
        canvas
    }

    fn rect(&mut self, area: Area, fill: &str, stroke: &str) {
        let Area { x, y, width, height } = area;
        self.line(&format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\" stroke=\"{stroke}\"/>"
        ));
    }

    fn write(&mut self, (x, y): (usize, usize), style: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        self.line(&format!("<text x=\"{x}\" y=\"{y}\" {style}>{text}</text>"));
    }

    fn line(&mut self, line: &str) {
        self.body.push_str(line);
        self.body.push('\n');
    }

    /// A coloured box with a text in its middle.
    pub(super) fn cell(&mut self, area: Area, colour: Colour, text: &str) {
        let Colour { index, strength } = colour;
        let fill = format!("{}\" fill-opacity=\"{}.{:02}", PALETTE[index], strength / 100, strength % 100);
        self.rect(area, &fill, "#8a8a86");
        self.text_in(area, text);
    }

    /// A box without colour, with a text in its middle.
    pub(super) fn blank(&mut self, area: Area, text: &str) {
        self.rect(area, "#f0f0ec", "#c4c4be");
        self.text_in(area, text);
    }

    fn text_in(&mut self, area: Area, text: &str) {
        let at = (area.x + area.width / 2, area.y + area.height / 2 + 4);
        // a narrow box has small letters
        let size = if area.width < 40 && text.len() > 3 { 9 } else { 11 };
        self.write(at, &format!("font-size=\"{size}\" text-anchor=\"middle\""), text);
    }

    /// A thick frame.
    pub(super) fn frame(&mut self, Area { x, y, width, height }: Area) {
        self.line(&format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#222\" stroke-width=\"2\"/>"
        ));
    }

    /// A text that begins at a place.
    pub(super) fn label(&mut self, at: (usize, usize), text: &str) {
        self.write(at, "font-size=\"12\"", text);
    }

    /// A text in bold that begins at a place.
    pub(super) fn heading(&mut self, at: (usize, usize), text: &str) {
        self.write(at, "font-size=\"13\" font-weight=\"bold\"", text);
    }

    /// A small grey text whose middle or end is at a place.
    pub(super) fn note(&mut self, at: (usize, usize), anchor: &str, text: &str) {
        self.write(at, &format!("font-size=\"10\" fill=\"#555\" text-anchor=\"{anchor}\""), text);
    }

    /// The picture.
    pub(super) fn finish(self) -> String {
        let Self { body, width, height } = self;
        let mut svg = String::new();
        let _infallible = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"Helvetica, Arial, sans-serif\" fill=\"#1c1c1c\">"
        );
        svg + &body + "</svg>\n"
    }
}

/// Boxes of one size side by side.
#[derive(Debug, Clone, Copy)]
pub(super) struct Raster {
    pub(super) corner: (usize, usize),
    pub(super) cell: (usize, usize),
}

impl Raster {
    /// The box of a row and column.
    pub(super) fn at(self, row: usize, column: usize) -> Area {
        self.span((row, column), (1, 1))
    }

    /// So many rows and columns from one on.
    pub(super) fn span(self, (row, column): (usize, usize), (rows, columns): (usize, usize)) -> Area {
        let (width, height) = self.cell;
        Area {
            x: self.corner.0 + column * width,
            y: self.corner.1 + row * height,
            width: columns * width,
            height: rows * height,
        }
    }

    /// Numbers rows at their left and columns above.
    pub(super) fn numbered(self, canvas: &mut Canvas, rows: usize, columns: usize) {
        for row in 0..rows {
            let area = self.at(row, 0);
            canvas.note((area.x - 5, area.y + area.height / 2 + 4), "end", &row.to_string());
        }
        for column in 0..columns {
            let area = self.at(0, column);
            canvas.note((area.x + area.width / 2, area.y - 4), "middle", &column.to_string());
        }
    }
}
