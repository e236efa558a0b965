//! `tilewright kernels list`: what is in the cache, and what this version knows.

use super::{cache, counted, folder, size, targets};
use clap::Args;
use miette::{IntoDiagnostic, Result};
use serde::Serialize;
use std::{
    fmt::{self, Write},
    path::PathBuf,
    time::Duration,
};
use tilewright_cuda::cache::{Footprint, Listed};

/// List the kernels in the cache, and those that this version knows
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// What there is.
#[derive(Serialize)]
struct Report {
    folder: PathBuf,
    /// The most recently used first.
    cached: Vec<Cached>,
    known: Vec<Known>,
}

/// An entry of the cache; one that is damaged has neither names nor resources.
#[derive(Serialize, Default)]
struct Cached {
    key: String,
    bytes: u64,
    seconds_since_use: u64,
    kernel: Option<String>,
    target: Option<String>,
    assembler: Option<String>,
    registers: Option<u32>,
    stack_bytes: Option<u32>,
    /// Why it cannot be used, and will be a miss.
    damage: Option<String>,
}

/// A kernel in a configuration.
#[derive(Serialize)]
struct Known {
    kernel: String,
    /// 90 is sm_90.
    archs: Vec<u32>,
}

pub(super) fn run(arguments: &Arguments) -> Result<String> {
    let cache = cache()?;
    let known = tilewright_kernels::all().into_iter();
    let report = Report {
        folder: folder(&cache)?.to_owned(),
        cached: cache.list().into_diagnostic()?.into_iter().map(Cached::from).collect(),
        known: known.map(|kernel| Known { kernel: kernel.name, archs: kernel.archs.to_vec() }).collect(),
    };
    if arguments.json {
        return Ok(serde_json::to_string_pretty(&report).into_diagnostic()? + "\n");
    }
    Ok(report.to_string())
}

impl From<Listed> for Cached {
    fn from(listed: Listed) -> Self {
        let entry = Self {
            key: listed.key.to_string(),
            bytes: listed.bytes,
            seconds_since_use: listed.used.elapsed().unwrap_or_default().as_secs(),
            ..Self::default()
        };
        match listed.code {
            Err(damage) => Self { damage: Some(damage), ..entry },
            Ok(code) => {
                let resources = Footprint::of(&code.cubin);
                Self {
                    registers: resources.map(|resources| resources.registers),
                    stack_bytes: resources.map(|resources| resources.stack_bytes),
                    kernel: Some(code.kernel),
                    target: Some(code.target),
                    assembler: Some(code.assembler),
                    ..entry
                }
            }
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.cached.iter().map(|entry| entry.bytes).sum();
        writeln!(f, "{}: {}, {}", self.folder.display(), counted(self.cached.len()), size(bytes))?;
        let names = self.cached.iter().filter_map(|entry| entry.kernel.as_ref());
        let names = names.chain(self.known.iter().map(|known| &known.kernel));
        let width = names.map(String::len).max().unwrap_or(0);
        if !self.cached.is_empty() {
            let mut rows = format!(
                "\n{:width$}  {:7}  {:>9}  {:>9}  {:>6}  {:>9}  assembled by\n",
                "in the cache", "target", "size", "registers", "spills", "used"
            );
            for entry in &self.cached {
                entry.row(width, &mut rows)?;
            }
            f.write_str(&rows)?;
        }
        writeln!(f, "\n{:width$}  for", "known")?;
        self.known
            .iter()
            .try_for_each(|known| writeln!(f, "{:width$}  {}", known.kernel, targets(&known.archs)))
    }
}

impl Cached {
    fn row(&self, width: usize, rows: &mut String) -> fmt::Result {
        let used = ago(Duration::from_secs(self.seconds_since_use));
        let bytes = size(self.bytes);
        if let Some(damage) = &self.damage {
            return writeln!(rows, "{:width$}  {:7}  {bytes:>9}  {damage}: {}", "damaged", "", self.key);
        }
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let number = |number: Option<u32>| number.map_or_else(|| "?".to_owned(), |number| number.to_string());
        writeln!(
            rows,
            "{:width$}  {:7}  {bytes:>9}  {:>9}  {:>6}  {used:>9}  {}",
            text(&self.kernel),
            text(&self.target),
            number(self.registers),
            number(self.stack_bytes),
            text(&self.assembler)
        )
    }
}

/// How long ago, in the largest unit that has been full.
fn ago(passed: Duration) -> String {
    match passed.as_secs() {
        0..60 => "now".to_owned(),
        seconds @ 60..3_600 => format!("{} min ago", seconds / 60),
        seconds @ 3_600..86_400 => format!("{} h ago", seconds / 3_600),
        seconds => format!("{} d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::ago;
    use std::time::Duration;

    #[test]
    fn ages_have_the_unit_that_fits() {
        let of = |seconds| ago(Duration::from_secs(seconds));
        assert_eq!(
            [59, 60, 3_599, 3_600, 86_399, 172_800].map(of),
            ["now", "1 min ago", "59 min ago", "1 h ago", "23 h ago", "2 d ago"]
        );
    }
}
