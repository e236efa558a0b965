//! What became of each fault, and how many of each area were caught.

use super::{fault::Fault, trial::End};
use std::{collections::BTreeMap, fmt::Write as _};

/// What became of a planted fault.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Caught,
    /// Caught by the time limit.
    Hung,
    Survived,
    DoesNotCompile(String),
    DoesNotApply(String),
    /// Its test cannot be believed, or not be run.
    ProvesNothing(String),
}

impl From<End> for Outcome {
    fn from(end: End) -> Self {
        match end {
            End::Failed => Self::Caught,
            End::Hung => Self::Hung,
            End::Passed => Self::Survived,
            End::Absent => Self::ProvesNothing("its test is gone".to_owned()),
        }
    }
}

impl Outcome {
    /// A word for it, and why.
    fn words(&self) -> (&'static str, &str) {
        match self {
            Self::Caught => ("caught", ""),
            Self::Hung => ("caught", "hung"),
            Self::Survived => ("SURVIVED", ""),
            Self::DoesNotCompile(why) => ("does not compile", why),
            Self::DoesNotApply(why) => ("does not apply", why),
            Self::ProvesNothing(why) => ("proves nothing", why),
        }
    }

    fn is_caught(&self) -> bool {
        matches!(self, Self::Caught | Self::Hung)
    }
}

/// The line of one fault.
pub(super) fn line(area: &str, fault: &Fault, outcome: &Outcome) -> String {
    let (word, why) = outcome.words();
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    format!("{word:16} {area}: {}: {}{why}", fault.about, fault.test)
}

/// Outcomes by area.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Faults, and those of them that were caught.
    areas: BTreeMap<String, (usize, usize)>,
}

impl Report {
    pub(super) fn add(&mut self, area: &str, outcome: &Outcome) {
        let (faults, caught) = self.areas.entry(area.to_owned()).or_default();
        *faults += 1;
        *caught += usize::from(outcome.is_caught());
    }

    fn table(&self) -> String {
        let mut table = format!("\n{:16} faults  caught\n", "area");
        for (area, (faults, caught)) in &self.areas {
            let _ = writeln!(table, "{area:16} {faults:6} {caught:7}");
        }
        let (faults, caught) = self.sums();
        let _ = writeln!(table, "{:16} {faults:6} {caught:7}", "all");
        table
    }

    fn sums(&self) -> (usize, usize) {
        self.areas.values().fold((0, 0), |sum, area| (sum.0 + area.0, sum.1 + area.1))
    }

    /// Prints the table.
    ///
    /// # Errors
    /// When a fault was not caught.
    pub(super) fn finish(&self) -> Result<(), String> {
        print!("{}", self.table());
        let (faults, caught) = self.sums();
        if caught == faults {
            Ok(())
        } else {
            Err(format!("{} of {faults} faults were not caught", faults - caught))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{End, Outcome, Report};

    #[test]
    fn only_a_test_that_fails_or_hangs_has_caught_a_fault() {
        let ends = [(End::Failed, true), (End::Hung, true), (End::Passed, false), (End::Absent, false)];
        for (end, caught) in ends {
            assert_eq!(Outcome::from(end).is_caught(), caught);
        }
        let why = String::new;
        for outcome in
            [Outcome::DoesNotCompile(why()), Outcome::DoesNotApply(why()), Outcome::ProvesNothing(why())]
        {
            assert!(!outcome.is_caught(), "{outcome:?}");
        }
    }

    #[test]
    fn one_fault_that_is_not_caught_fails_the_check() {
        let mut report = Report::default();
        report.add("merge", &Outcome::Caught);
        report.add("merge", &Outcome::Hung);
        assert_eq!(report.finish(), Ok(()));
        report.add("masks", &Outcome::Survived);
        assert_eq!(report.finish().unwrap_err(), "1 of 3 faults were not caught");
        let rows: Vec<String> = report
            .table()
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(rows, ["", "area faults caught", "masks 1 0", "merge 2 2", "all 3 2"]);
    }
}
