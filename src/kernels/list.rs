//! `tilewright kernels list`: cached kernels, and all kernels of this version.

use super::{cache, folder, kernel_count, selection, size, targets};
use clap::Args;
use miette::{IntoDiagnostic, Result};
use serde::Serialize;
use std::{
    fmt::{self, Write},
    path::PathBuf,
    time::Duration,
};
use tilewright_cuda::cache::{CacheEntry, Footprint};

/// List the cached kernels and all kernels of this version
#[derive(Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Cached and known kernels.
#[derive(Serialize)]
struct KernelList {
    folder: PathBuf,
    /// Most recently used first.
    cached: Vec<CachedKernel>,
    known: Vec<KnownKernel>,
}

/// An entry of the cache; a damaged one has neither names nor resources.
#[derive(Serialize, Default)]
struct CachedKernel {
    key: String,
    bytes: u64,
    seconds_since_use: u64,
    kernel: Option<String>,
    target: Option<String>,
    assembler: Option<String>,
    registers: Option<u32>,
    stack_bytes: Option<u32>,
    /// Why the entry is unusable; it counts as a miss.
    damage: Option<String>,
}

/// A kernel of this version.
#[derive(Serialize)]
struct KnownKernel {
    kernel: String,
    /// 90 is sm_90.
    archs: Vec<u32>,
}

pub(super) fn run(arguments: &ListArgs) -> Result<String> {
    let cache = cache()?;
    let known = selection::known().into_iter();
    let report = KernelList {
        folder: folder(&cache)?.to_owned(),
        cached: cache.list().into_diagnostic()?.into_iter().map(CachedKernel::from).collect(),
        known: known
            .map(|kernel| KnownKernel { kernel: kernel.name, archs: kernel.archs.to_vec() })
            .collect(),
    };
    if arguments.json {
        return Ok(serde_json::to_string_pretty(&report).into_diagnostic()? + "\n");
    }
    Ok(report.to_string())
}

impl From<CacheEntry> for CachedKernel {
    fn from(listed: CacheEntry) -> Self {
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

impl fmt::Display for KernelList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.cached.iter().map(|entry| entry.bytes).sum();
        writeln!(f, "{}: {}, {}", self.folder.display(), kernel_count(self.cached.len()), size(bytes))?;
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

impl CachedKernel {
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

/// Elapsed time in the largest unit that is at least 1.
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
    fn ages_have_a_suitable_unit() {
        let of = |seconds| ago(Duration::from_secs(seconds));
        assert_eq!(
            [59, 60, 3_599, 3_600, 86_399, 172_800].map(of),
            ["now", "1 min ago", "59 min ago", "1 h ago", "23 h ago", "2 d ago"]
        );
    }
}
