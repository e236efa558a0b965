//! Mutation testing: `cargo xtask mutants ir` mutates the IR of kernels, `cargo xtask mutants host` mutates host code.
//!
//! Results are recorded in `benches/record/mutants/`. `xtask/mutants-equivalent.toml` gives the reasons of survivors that cannot
//! change a result: a list of `equivalent` with `mutant` (part of `kernel or file: mutant at file:line`), `source` (text of its source
//! line) and `reason`.
//! The score of a kernel or file is killed / (mutants - equivalent).

mod host;
mod ir;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};
use toml::Value;

const FOLDER: &str = "benches/record/mutants";
const EQUIVALENT: &str = "xtask/mutants-equivalent.toml";

/// `cargo xtask mutants ir [--kernel NAME]... [--sample N]` or `cargo xtask mutants host`.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    match arguments {
        ["host"] => host::run(root),
        ["ir", options @ ..] => ir::run(root, &ir::Options::parse(options)?),
        _ => Err("expected `mutants ir [--kernel NAME]... [--sample N]` or `mutants host`".to_owned()),
    }
}

/// A mutant that no test detects.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Survivor {
    mutant: String,
    /// `file:line`, with or without a column.
    at: String,
}

/// The result for one kernel or source file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Score {
    mutants: usize,
    survivors: Vec<Survivor>,
}

impl Score {
    fn killed(&self) -> usize {
        self.mutants - self.survivors.len()
    }
}

/// The record of one kind of mutants: a summary row per kernel or file, followed by its survivors.
struct Record {
    root: PathBuf,
    path: PathBuf,
    header: String,
    reasons: Vec<BTreeMap<String, String>>,
    rows: BTreeMap<String, String>,
}

impl Record {
    /// Reads the record `name`, which may not exist yet.
    fn read(root: &Path, name: &str, subject: &str) -> Result<Self, String> {
        let path = root.join(FOLDER).join(name);
        let header = format!("{subject},mutants,killed,equivalent,survivor,at,reason\n");
        let mut rows: BTreeMap<String, String> = BTreeMap::new();
        for line in fs::read_to_string(&path).unwrap_or_default().lines().skip(1) {
            let subject = line.split(',').next().unwrap_or_default();
            *rows.entry(subject.to_owned()).or_default() += &format!("{line}\n");
        }
        let text = fs::read_to_string(root.join(EQUIVALENT)).unwrap_or_default();
        Ok(Self { root: root.to_owned(), path, header, reasons: reasons(&text)?, rows })
    }

    /// Removes the rows of kernels or files for which `exists` is false.
    fn retain(&mut self, exists: impl Fn(&str) -> bool) {
        self.rows.retain(|subject, _| exists(subject));
    }

    /// The number of survivors that cannot change a result.
    fn equivalent(&self, subject: &str, score: &Score) -> usize {
        score.survivors.iter().filter(|survivor| !self.reason(subject, survivor).is_empty()).count()
    }

    /// Replaces the rows of a kernel or file and writes the record.
    fn set(&mut self, subject: &str, score: &Score) -> Result<(), String> {
        let counts = [score.mutants, score.killed(), self.equivalent(subject, score)];
        let counts = counts.map(|count| count.to_string());
        let mut rows = format!("{subject},{},,,\n", counts.join(","));
        for survivor in &score.survivors {
            let fields = [&survivor.mutant, &survivor.at, self.reason(subject, survivor)].map(quoted);
            let _ = writeln!(rows, "{subject},,,,{}", fields.join(","));
        }
        self.rows.insert(subject.to_owned(), rows);
        let text = self.header.clone() + &self.rows.values().map(String::as_str).collect::<String>();
        let failed = |why| format!("{}: {why}", self.path.display());
        fs::create_dir_all(self.root.join(FOLDER)).map_err(failed)?;
        fs::write(&self.path, text).map_err(failed)
    }

    /// The reason of a survivor of a kernel or file, empty if unknown.
    fn reason(&self, subject: &str, survivor: &Survivor) -> &str {
        let (file, rest) = survivor.at.split_once(':').unwrap_or((&survivor.at, ""));
        let number: usize = rest.split(':').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        let text = fs::read_to_string(self.root.join(file)).unwrap_or_default();
        let line = text.lines().nth(number.saturating_sub(1)).unwrap_or_default();
        let mutant = format!("{subject}: {} at {}", survivor.mutant, survivor.at);
        let fits = |reason: &&BTreeMap<String, String>| {
            mutant.contains(&reason["mutant"]) && line.contains(&reason["source"])
        };
        self.reasons.iter().find(fits).map_or("", |reason| &reason["reason"])
    }
}

/// The entries of the file of equivalent mutants, with all three keys each.
fn reasons(text: &str) -> Result<Vec<BTreeMap<String, String>>, String> {
    let table: BTreeMap<String, Vec<BTreeMap<String, Value>>> =
        toml::from_str(text).map_err(|why| format!("{EQUIVALENT}: {why}"))?;
    let entry = |entry: &BTreeMap<String, Value>| {
        let field = |key: &str| match entry.get(key).and_then(Value::as_str) {
            Some(value) => Ok((key.to_owned(), value.to_owned())),
            None => Err(format!("{EQUIVALENT}: an entry lacks `{key}`")),
        };
        ["mutant", "source", "reason"].into_iter().map(field).collect()
    };
    table.get("equivalent").map_or(Ok(Vec::new()), |entries| entries.iter().map(entry).collect())
}

/// An error that names the filters that select no test: a test that was renamed would no longer detect mutants.
fn check_filters<'a>(
    package: &str,
    filters: impl IntoIterator<Item = &'a str>,
    selects: impl Fn(&str) -> bool,
) -> Result<(), String> {
    let idle: Vec<&str> = filters.into_iter().filter(|filter| !selects(filter)).collect();
    if idle.is_empty() {
        return Ok(());
    }
    Err(format!("{package}: no test matches {}, expected at least one for each filter", idle.join(", ")))
}

/// The names of the tests in a list that a test binary has printed.
fn test_names(list: &str) -> Vec<&str> {
    list.lines().filter_map(|line| line.strip_suffix(": test")).collect()
}

fn quoted(field: impl AsRef<str>) -> String {
    format!("\"{}\"", field.as_ref().replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::{EQUIVALENT, Record, Score, Survivor, check_filters, reasons, test_names};
    use std::fs;

    #[test]
    fn a_record_keeps_other_rows_and_gives_reasons() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            fs::create_dir_all(root.path().join(path).parent().unwrap()).unwrap();
            fs::write(root.path().join(path), text).unwrap();
        };
        write(
            EQUIVALENT,
            "[[equivalent]]\nmutant = \"a: remove bar.sync, \\\"0\\\" at src/a.rs\"\nsource = \"sync\"\nreason = \"one warp\"\n",
        );
        write("src/a.rs", "\nk.sync();\nother();\n");
        write("benches/record/mutants/ir.csv", "head\nb,1,1,0,,,\n");
        let survivor =
            |line| Survivor { mutant: "remove bar.sync, \"0\"".to_owned(), at: format!("src/a.rs:{line}:4") };
        let score = Score { mutants: 4, survivors: vec![survivor(2), survivor(3)] };
        Record::read(root.path(), "ir.csv", "kernel").unwrap().set("a", &score).unwrap();
        let record = Record::read(root.path(), "ir.csv", "kernel").unwrap();
        assert_eq!(["a", "b"].map(|kernel| record.equivalent(kernel, &score)), [1, 0]);
        let text = fs::read_to_string(root.path().join("benches/record/mutants/ir.csv")).unwrap();
        let survivor = "a,,,,\"remove bar.sync, \"\"0\"\"\",\"src/a.rs";
        let rows = format!("a,4,2,1,,,\n{survivor}:2:4\",\"one warp\"\n{survivor}:3:4\",\"\"\nb,1,1,0,,,\n");
        assert_eq!(text, format!("kernel,mutants,killed,equivalent,survivor,at,reason\n{rows}"));
        let mut record = Record::read(root.path(), "ir.csv", "kernel").unwrap();
        record.retain(|kernel| kernel != "b");
        record.set("c", &Score::default()).unwrap();
        assert_eq!(record.rows.keys().collect::<Vec<_>>(), ["a", "c"]);
    }

    #[test]
    fn filters_without_tests_are_errors() {
        let names = test_names("a::b: test\nc: test\nd: benchmark\n\n3 tests\n");
        assert_eq!(names, ["a::b", "c"]);
        let selects = |filter: &str| names.iter().any(|name| name.contains(filter));
        assert_eq!(check_filters("p", ["a::", "c"], selects), Ok(()));
        let why = check_filters("p", ["a::", "d", "e"], selects).unwrap_err();
        assert_eq!(why, "p: no test matches d, e, expected at least one for each filter");
    }

    #[test]
    fn incomplete_reasons_are_errors() {
        let why = reasons("[[equivalent]]\nmutant = \"a\"\nreason = \"b\"\n").unwrap_err();
        assert_eq!(why, format!("{EQUIVALENT}: an entry lacks `source`"));
        assert!(reasons("").unwrap().is_empty());
    }
}
