//! README.md and docs/performance.md quote only recorded measurements.
//!
//! A *figure* is a number with a unit of speed, time or share. Figures in tables of these pages, and in paragraphs that link
//! to a record, must occur in a file of `benches/record/` to which their section links. The recorded number may be longer and
//! round to the figure. It has the figure's unit or the base unit (seconds for ms and µs, a fraction for %).

use super::{Guard, numbered};
use crate::tree::Tree;

const PAGES: [&str; 2] = ["README.md", "docs/performance.md"];
const RECORDS: &str = "benches/record/";
/// Units, with the factors from recorded numbers to the unit.
const UNITS: [(&str, &[f64]); 16] = [
    ("s", &[1.0]),
    ("ms", &[1.0, 1e3]),
    ("µs", &[1.0, 1e3, 1e6]),
    ("us", &[1.0, 1e3, 1e6]),
    ("ns", &[1.0, 1e3, 1e6, 1e9]),
    ("%", &[1.0, 100.0]),
    ("x", &[1.0]),
    ("×", &[1.0]),
    ("GB/s", &[1.0]),
    ("TB/s", &[1.0, 1e-3]),
    ("GFLOP/s", &[1.0]),
    ("TFLOP/s", &[1.0, 1e-3]),
    ("GFLOPS", &[1.0]),
    ("TFLOPS", &[1.0, 1e-3]),
    ("tok/s", &[1.0]),
    ("tokens/s", &[1.0]),
];

pub(super) const GUARD: Guard = Guard { name: "figures", check, planted, clean };

struct Figure {
    spelled: String,
    value: f64,
    /// Half of the last digit.
    tolerance: f64,
    factors: &'static [f64],
}

fn check(tree: &Tree) -> Vec<String> {
    PAGES.into_iter().flat_map(|page| check_page(tree, page)).collect()
}

fn check_page(tree: &Tree, page: &str) -> Vec<String> {
    let lines: Vec<(usize, &str)> = numbered(tree.text(page).unwrap_or_default()).collect();
    let mut complaints = Vec::new();
    let starts_section = |line: &(usize, &str)| line.1.starts_with('#');
    for section in lines.chunk_by(|_, next| !starts_section(next)) {
        let links = section.iter().flat_map(|(_, line)| records(line));
        let recorded: Vec<f64> = links.filter_map(|path| tree.text(path)).flat_map(numbers).collect();
        for paragraph in section.split(|(_, line)| line.trim().is_empty()) {
            let measured = paragraph.iter().any(|(_, line)| records(line).next().is_some());
            let quoting = paragraph.iter().filter(|(_, line)| measured || line.starts_with('|'));
            for (number, line) in quoting {
                let unknown = figures(line).into_iter().filter(|figure| !figure.is_in(&recorded));
                complaints.extend(unknown.map(|figure| {
                    let spelled = figure.spelled;
                    format!("{page}:{number}: `{spelled}` is in no file of {RECORDS} that its section names")
                }));
            }
        }
    }
    complaints
}

/// Files of the record that a line links to or names.
fn records(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices(RECORDS).map(|(at, _)| {
        let rest = &line[at..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && !"/._-".contains(c)).unwrap_or(rest.len());
        rest[..end].trim_end_matches('.')
    })
}

/// The measured numbers of a recorded file, without its comments and its columns of targets and expectations.
fn numbers(text: &str) -> Vec<f64> {
    let numeric = |c: char| c.is_ascii_digit() || c == '.';
    let lines = || text.lines().filter(|line| !line.starts_with('#'));
    let is_target = |column: &str| column == "target" || column.ends_with("_expected");
    let skipped: Vec<bool> = lines().next().unwrap_or_default().split(',').map(is_target).collect();
    let is_measured = |(at, _): &(usize, &str)| !skipped.get(*at).copied().unwrap_or(false);
    let cells = lines().flat_map(|line| line.split(',').enumerate().filter(is_measured));
    let words = cells.flat_map(|(_, cell)| cell.split(|c| !numeric(c)));
    words.filter_map(|word| word.trim_end_matches('.').parse().ok()).collect()
}

/// Numbers of a line with a unit: `12.5 GB/s`, `70%`, `1,024 tok/s`. Link targets are ignored.
fn figures(line: &str) -> Vec<Figure> {
    let line = line.split("](").map(|part| part.split_once(')').map_or(part, |(_, rest)| rest));
    let line = line.collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    let mut rest = line.as_str();
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let number = &rest[start..];
        let end = number.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ',').unwrap_or(number.len());
        let in_word = rest[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let digits = number[..end].trim_end_matches(['.', ',']).replace(',', "");
        rest = &number[end..];
        let unit = rest.trim_start_matches([' ', '\u{a0}', '\u{202f}']);
        let unit =
            &unit[..unit.find(|c: char| !c.is_alphabetic() && !"/%×".contains(c)).unwrap_or(unit.len())];
        let known = UNITS.iter().find(|(name, _)| *name == unit).filter(|_| !in_word);
        if let (Some((name, factors)), Ok(value)) = (known, digits.parse()) {
            let decimals = digits.split_once('.').map_or(0, |(_, fraction)| fraction.len());
            let tolerance = 0.5 * 10f64.powi(-(decimals as i32));
            found.push(Figure { spelled: format!("{digits} {name}"), value, tolerance, factors });
        }
    }
    found
}

impl Figure {
    fn is_in(&self, recorded: &[f64]) -> bool {
        let close = |number: f64| (number - self.value).abs() <= self.tolerance * (1.0 + 1e-9);
        recorded.iter().any(|number| self.factors.iter().any(|factor| close(number * factor)))
    }
}

fn readme(text: &str) -> Tree {
    let columns = "case,seconds,rate,share,target,speedup,speedup_expected";
    let record = format!("# threads: 2\n{columns}\ndecode,0.001234,12.48,0.703,0.65,4.25,5\n");
    Tree::of([(PAGES[0], text.to_owned()), ("benches/record/cpu/2026-01-31.csv", record)])
}

fn planted() -> Vec<(Tree, &'static str)> {
    let other_page = Tree::of([(PAGES[1], "| decode | 12.5 GB/s |".to_owned())]);
    let recorded = "[record](benches/record/cpu/2026-01-31.csv)";
    vec![
        (other_page, "docs/performance.md:1: `12.5 GB/s`"),
        (readme("| decode | 12.5 GB/s |"), "README.md:1: `12.5 GB/s`"),
        (readme(&format!("| decode | 12.4 GB/s | {recorded} |")), "`12.4 GB/s`"),
        (readme(&format!("| decode | 71 % |\n\nSee {recorded}.")), "`71 %`"),
        (readme(&format!("| decode | 1.25 ms |\n{recorded}")), "`1.25 ms`"),
        (readme(&format!("| decode | 2x |\n{recorded}")), "`2 x`"),
        (readme(&format!("| decode | 65 % |\n{recorded}")), "`65 %`"),
        (readme(&format!("| decode | 5x |\n{recorded}")), "`5 x`"),
        (readme(&format!("It takes 2.1 ms ({recorded}).")), "`2.1 ms`"),
        (readme(&format!("{recorded}\n## Next\n| decode | 12.5 GB/s |")), "README.md:3: `12.5 GB/s`"),
        (readme("| decode | 3x | [record](benches/record/none.csv) |"), "`3 x`"),
    ]
}

fn clean() -> Tree {
    readme(
        "A page has 16 tokens; a wheel of 3 GB and 8 s of waiting are other people's.\n\
         ## Speed\n| case | rate | time | share |\n|---|---|---|---|\n\
         | decode of 4,096 keys | 12.5 GB/s | 1.23 ms, 1,234 µs | 70 %, 4.3x |\n\n\
         Recorded in [the record](benches/record/cpu/2026-01-31.csv).\n\
         ## Sizes\n| layers | 8 | v1s | bf16 x 2 |\n",
    )
}
