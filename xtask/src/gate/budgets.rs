//! Resource budgets of the kernels: `crates/tilewright-kernels/budgets.csv`, one row per kernel and architecture.
//!
//! A budget is an upper bound for registers and other resources, and exact for MMA and copy instructions.

use super::measure::Measured;
use std::{collections::BTreeMap, fmt::Write as _};

/// The file, from the root.
pub(crate) const FILE: &str = "crates/tilewright-kernels/budgets.csv";

/// The comparison of a number with its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    NotAbove,
    Equal,
}

/// A column: its name, its rule, and the function that reads its number.
type Column = (&'static str, Rule, fn(&Measured) -> u64);

const COLUMNS: [Column; 11] = [
    ("registers", Rule::NotAbove, |m| m.report.registers),
    ("spills", Rule::NotAbove, |m| m.report.spill_stores + m.report.spill_loads),
    ("shared", Rule::NotAbove, |m| m.shared),
    ("barriers", Rule::NotAbove, |m| m.report.barriers),
    // QGMMA are products of 8 bits
    ("hgmma", Rule::Equal, |m| m.count("HGMMA") + m.count("QGMMA")),
    ("hmma", Rule::Equal, |m| m.count("HMMA")),
    ("ldgsts", Rule::Equal, |m| m.count("LDGSTS")),
    ("utmaldg", Rule::Equal, |m| m.count("UTMALDG")),
    ("mufu", Rule::NotAbove, |m| m.count("MUFU")),
    ("r2ur", Rule::NotAbove, |m| m.count("R2UR")),
    ("stack", Rule::NotAbove, |m| m.report.stack),
];

/// Kernel and architecture.
type Key = (String, u32);

/// The budgets of a file, in the order of [`COLUMNS`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Budgets(BTreeMap<Key, Vec<u64>>);

impl Budgets {
    /// The measurements as budgets.
    pub(crate) fn of(measured: &[Measured]) -> Self {
        let row = |m: &Measured| {
            ((m.kernel.clone(), m.arch), COLUMNS.iter().map(|(_, _, number)| number(m)).collect())
        };
        Self(measured.iter().map(row).collect())
    }

    /// Removes the rows of kernels and architectures that `other` lacks.
    pub(crate) fn retain_keys_of(&mut self, other: &Self) {
        self.0.retain(|key, _| other.0.contains_key(key));
    }

    /// Adds the rows of `other`, which replace those of the same kernel and architecture.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The text of the file: rows sorted by kernel and architecture.
    pub(crate) fn text(&self) -> String {
        let mut text = header();
        for ((kernel, arch), numbers) in &self.0 {
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            let _ = writeln!(text, "{kernel},{arch},{}", numbers.join(","));
        }
        text
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some(rows) = text.strip_prefix(&header()) else {
            return Err(format!("{FILE}:1: expected the columns `{}`", header().trim()));
        };
        let mut budgets = BTreeMap::new();
        for (number, line) in (2..).zip(rows.lines()) {
            let (key, numbers) = row(line).ok_or_else(|| format!("{FILE}:{number}: `{line}` is no row"))?;
            if budgets.insert(key, numbers).is_some() {
                return Err(format!("{FILE}:{number}: a second row for this kernel and architecture"));
            }
        }
        Ok(Self(budgets))
    }

    /// The violations of these budgets, one line each.
    pub(crate) fn broken_by(&self, measured: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        for (key @ (kernel, arch), numbers) in &measured.0 {
            let Some(budget) = self.0.get(key) else {
                lines.push(format!("{kernel} sm_{arch}: has no budget"));
                continue;
            };
            for ((&(name, rule, _), now), may) in COLUMNS.iter().zip(numbers).zip(budget) {
                let word = match rule {
                    Rule::NotAbove if now > may => "at most",
                    Rule::Equal if now != may => "exactly",
                    _ => continue,
                };
                lines.push(format!("{kernel} sm_{arch}: {name} = {now}, the budget is {word} {may}"));
            }
        }
        let gone = self.0.keys().filter(|key| !measured.0.contains_key(key));
        lines
            .extend(gone.map(|(kernel, arch)| format!("{kernel} sm_{arch}: has a budget, but is no kernel")));
        lines
    }

    /// The number of rows that could be tighter.
    pub(crate) fn loosened_by(&self, measured: &Self) -> usize {
        measured
            .0
            .iter()
            .filter(|(key, numbers)| self.0.get(key).is_some_and(|budget| budget != *numbers))
            .count()
    }
}

fn header() -> String {
    let names: Vec<&str> = COLUMNS.iter().map(|&(name, ..)| name).collect();
    format!("kernel,arch,{}\n", names.join(","))
}

fn row(line: &str) -> Option<(Key, Vec<u64>)> {
    let (kernel, rest) = line.split_once(',')?;
    let (arch, numbers) = rest.split_once(',')?;
    let numbers: Vec<u64> = numbers.split(',').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    (numbers.len() == COLUMNS.len()).then_some(((kernel.to_owned(), arch.parse().ok()?), numbers))
}

#[cfg(test)]
mod tests {
    use super::{Budgets, FILE};

    const HEAD: &str =
        "kernel,arch,registers,spills,shared,barriers,hgmma,hmma,ldgsts,utmaldg,mufu,r2ur,stack\n";

    fn budgets(rows: &str) -> Budgets {
        Budgets::parse(&format!("{HEAD}{rows}")).unwrap()
    }

    #[test]
    fn rows_round_trip_sorted() {
        let (a, b) = ("a,80,1,0,3,4,5,6,7,8,9,10,0\n", "a,120,1,0,3,4,5,6,7,8,9,10,0\n");
        assert_eq!(budgets(&format!("{b}{a}")).text(), format!("{HEAD}{a}{b}"));
    }

    #[test]
    fn a_partial_measurement_keeps_the_other_rows() {
        let [a, b, new] = [
            "a,80,1,0,3,4,5,6,7,8,9,10,0\n",
            "b,80,2,0,3,4,5,6,7,8,9,10,0\n",
            "b,80,5,0,3,4,5,6,7,8,9,10,0\n",
        ];
        let mut all = budgets(&format!("{a}{b}"));
        all.extend(budgets(new));
        assert_eq!(all.text(), format!("{HEAD}{a}{new}"));
        all.retain_keys_of(&budgets(b));
        assert_eq!(all.text(), format!("{HEAD}{new}"));
    }

    #[test]
    fn only_exact_columns_reject_a_smaller_number() {
        let budget = budgets("a,90,168,0,1024,2,32,0,0,6,139,44,0\n");
        let check = |row: &str| budget.broken_by(&budgets(row));
        assert!(check("a,90,160,0,1000,1,32,0,0,6,130,43,0\n").is_empty());
        assert_eq!(
            check("a,90,169,8,1024,2,31,1,0,6,139,45,0\n"),
            [
                "a sm_90: registers = 169, the budget is at most 168",
                "a sm_90: spills = 8, the budget is at most 0",
                "a sm_90: hgmma = 31, the budget is exactly 32",
                "a sm_90: hmma = 1, the budget is exactly 0",
                "a sm_90: r2ur = 45, the budget is at most 44",
            ]
        );
        assert_eq!(budget.loosened_by(&budgets("a,90,160,0,1024,2,32,0,0,6,139,44,0\n")), 1);
        assert_eq!(budget.loosened_by(&budgets("a,90,168,0,1024,2,32,0,0,6,139,44,0\n")), 0);
    }

    #[test]
    fn kernels_and_budgets_must_match() {
        let (a, b) = (budgets("a,90,1,0,3,4,5,6,7,8,9,10,0\n"), budgets("b,90,1,0,3,4,5,6,7,8,9,10,0\n"));
        assert_eq!(a.broken_by(&b), ["b sm_90: has no budget", "a sm_90: has a budget, but is no kernel"]);
    }

    #[test]
    fn malformed_files_report_the_line() {
        for (rows, why) in [
            ("a,90,1\n", ":2: `a,90,1` is no row"),
            ("a,90,1,0,3,4,5,6,7,8,9,x,0\n", ":2: `a,90,1,0,3,4,5,6,7,8,9,x,0` is no row"),
            (
                "a,90,1,0,3,4,5,6,7,8,9,10,0\na,90,1,0,3,4,5,6,7,8,9,10,0\n",
                ":3: a second row for this kernel and architecture",
            ),
        ] {
            assert_eq!(Budgets::parse(&format!("{HEAD}{rows}")).unwrap_err(), format!("{FILE}{why}"));
        }
        let why = Budgets::parse("kernel,arch\n").unwrap_err();
        assert_eq!(why, format!("{FILE}:1: expected the columns `{}`", HEAD.trim()));
    }
}
