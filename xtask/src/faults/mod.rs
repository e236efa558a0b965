//! The mutation check: `cargo xtask faults` plants each fault of `tests/faults/` alone, and its test must then fail.
//!
//! ```text
//! copy the tree                                  the faults are planted there, never in the user's files
//! for each test that a fault names:    run it    one that fails without any fault proves nothing
//! for each fault:    plant, build, run its test, undo
//! ```

pub(crate) mod fault;
mod report;
mod scratch;
mod trial;

use crate::tree::Tree;
use fault::Fault;
use indicatif::{ProgressBar, ProgressStyle};
use report::{Outcome, Report};
use scratch::Scratch;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};
use trial::{Built, End};

/// A test may take this long at least, and so many times as long as without a fault: a machine has other work, too.
const LEAST_LIMIT: Duration = Duration::from_secs(30);
const SLOWER: u32 = 10;
/// Without a fault nothing is known of a test's time.
const UNHARMED_LIMIT: Duration = Duration::from_secs(900);

/// A fault and the area that it belongs to.
#[derive(Debug, Clone)]
struct Planted {
    area: String,
    fault: Fault,
}

/// What a fault's test needs without the fault, or why it proves nothing.
type Unharmed = Result<Duration, String>;

/// `cargo xtask faults [AREA...] [--list]`.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let (options, wanted): (Vec<&str>, Vec<&str>) = arguments.iter().partition(|word| word.starts_with('-'));
    if let Some(option) = options.iter().find(|option| **option != "--list") {
        return Err(format!("`{option}` is no option of `cargo xtask faults`, which has `--list`"));
    }
    let mut faults = read(&Tree::read(root)?, &wanted)?;
    if !options.is_empty() {
        list(&faults);
        return Ok(());
    }
    // each target and file in one go, so that little is built again from one fault to the next
    let key = |planted: &Planted| {
        [&planted.fault.package, &planted.fault.target, &planted.fault.file].map(String::clone)
    };
    faults.sort_by_key(key);
    let output = crate::target(root).join("faults");
    let check = Check { scratch: Scratch::copy(root, &output.join("tree"))?, output };
    check.run(&faults)
}

/// The faults of the wanted areas, or of all.
fn read(tree: &Tree, wanted: &[&str]) -> Result<Vec<Planted>, String> {
    let names: BTreeSet<&str> = fault::areas(tree).map(|(area, ..)| area).collect();
    if let Some(area) = wanted.iter().find(|area| !names.contains(*area)) {
        let names: Vec<&str> = names.into_iter().collect();
        return Err(format!("no area `{area}` in {}, there are {}", fault::FOLDER, names.join(", ")));
    }
    let mut faults = Vec::new();
    for (area, path, text) in
        fault::areas(tree).filter(|(area, ..)| wanted.is_empty() || wanted.contains(area))
    {
        let parsed = fault::parse(text).map_err(|why| format!("{path}: {why}"))?;
        faults.extend(parsed.into_iter().map(|fault| Planted { area: area.to_owned(), fault }));
    }
    Ok(faults)
}

fn list(faults: &[Planted]) {
    for Planted { area, fault } in faults {
        println!(
            "{area}: {}\n  {} by {}/{} {}",
            fault.about, fault.file, fault.package, fault.target, fault.test
        );
    }
    println!("{} faults", faults.len());
}

/// The copy, and where it is built.
struct Check {
    scratch: Scratch,
    output: PathBuf,
}

impl Check {
    fn run(&self, faults: &[Planted]) -> Result<(), String> {
        let tests: BTreeSet<_> = faults.iter().map(|planted| test_of(&planted.fault)).collect();
        let bar = ProgressBar::new((tests.len() + faults.len()) as u64);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed}, {eta} left  {msg}");
        bar.set_style(style.expect("the template is sound"));
        bar.enable_steady_tick(Duration::from_millis(500));
        let unharmed = self.unharmed(faults, &bar);
        let mut report = Report::default();
        for Planted { area, fault } in faults {
            bar.set_message(fault.about.clone());
            let outcome = match &unharmed[&test_of(fault)] {
                Ok(time) => self.plant(fault, *time),
                Err(why) => Outcome::ProvesNothing(why.clone()),
            };
            bar.suspend(|| println!("{}", report::line(area, fault, &outcome)));
            report.add(area, &outcome);
            bar.inc(1);
        }
        bar.finish_and_clear();
        report.finish()
    }

    /// Runs every named test once without a fault.
    fn unharmed<'a>(&self, faults: &'a [Planted], bar: &ProgressBar) -> BTreeMap<[&'a str; 3], Unharmed> {
        let mut targets: BTreeMap<[&str; 2], Result<Built, String>> = BTreeMap::new();
        let mut tests = BTreeMap::new();
        for fault in faults.iter().map(|planted| &planted.fault) {
            let test @ [package, target, name] = test_of(fault);
            if tests.contains_key(&test) {
                continue;
            }
            bar.set_message(format!("{name}, unharmed"));
            let built = targets
                .entry([package, target])
                .or_insert_with(|| trial::build(&self.scratch.root, &self.output, fault));
            tests.insert(test, time_of(built, name));
            bar.inc(1);
        }
        tests
    }

    fn plant(&self, fault: &Fault, unharmed: Duration) -> Outcome {
        let limit = LEAST_LIMIT.max(unharmed * SLOWER);
        let outcome =
            self.scratch.with_fault(fault, || match trial::build(&self.scratch.root, &self.output, fault) {
                Ok(built) => {
                    built.run(&fault.test, limit).map_or_else(Outcome::ProvesNothing, |(end, _)| end.into())
                }
                Err(why) => Outcome::DoesNotCompile(why),
            });
        outcome.unwrap_or_else(Outcome::DoesNotApply)
    }
}

/// Package, target and name of a fault's test.
fn test_of(fault: &Fault) -> [&str; 3] {
    [&fault.package, &fault.target, &fault.test]
}

fn time_of(built: &Result<Built, String>, name: &str) -> Unharmed {
    let built =
        built.as_ref().map_err(|why| format!("without a fault, its target does not compile: {why}"))?;
    match built.run(name, UNHARMED_LIMIT)? {
        (End::Passed, time) => Ok(time),
        (End::Failed, _) => Err("its test fails without a fault".to_owned()),
        (End::Absent, _) => Err("its test does not exist".to_owned()),
        (End::Hung, _) => Err("its test hangs without a fault".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::read;
    use crate::tree::Tree;

    fn tree() -> Tree {
        let area = |about: &str| {
            format!("[[fault]]\nabout='{about}'\nfile='a'\nreplace='b'\nwith='c'\ntarget='d'\ntest='e'")
        };
        Tree::of([("tests/faults/masks.toml", area("hidden")), ("tests/faults/merge.toml", area("lost"))])
    }

    #[test]
    fn the_wanted_areas_are_read_and_without_a_wish_all() {
        let about = |wanted: &[&str]| {
            let faults = read(&tree(), wanted).unwrap();
            faults.into_iter().map(|planted| (planted.area, planted.fault.about)).collect::<Vec<_>>()
        };
        let owned = |area: &str, about: &str| (area.to_owned(), about.to_owned());
        assert_eq!(about(&["merge"]), [owned("merge", "lost")]);
        assert_eq!(about(&[]), [owned("masks", "hidden"), owned("merge", "lost")]);
    }

    #[test]
    fn an_area_that_is_not_there_is_an_error_that_names_those_that_are() {
        let why = read(&tree(), &["cascade"]).unwrap_err();
        assert_eq!(why, "no area `cascade` in tests/faults/, there are masks, merge");
    }
}
