//! Guards: project conventions that the compiler does not check. Each guard is first tested: it must report each planted
//! violation, and nothing in a tree without violations.

mod dependencies;
mod environment;
mod figures;
mod language;
mod limits;
mod links;
mod names;
mod openings;
mod sizes;
mod tested;
mod unfinished;
mod unsafe_code;

use crate::{
    text::{numbered, words},
    tree::Tree,
};

/// One rule.
struct Guard {
    name: &'static str,
    /// Reports the violations of a tree, one line each.
    check: fn(&Tree) -> Vec<String>,
    /// Trees with one violation each, and text that the report must contain.
    planted: fn() -> Vec<(Tree, &'static str)>,
    /// A tree that resembles violations and has none.
    clean: fn() -> Tree,
}

const GUARDS: [Guard; 12] = [
    sizes::GUARD,
    openings::GUARD,
    names::GUARD,
    unfinished::GUARD,
    unsafe_code::GUARD,
    dependencies::GUARD,
    environment::GUARD,
    links::GUARD,
    figures::GUARD,
    language::GUARD,
    limits::GUARD,
    tested::GUARD,
];

/// Proves every guard, then applies all of them to `tree`.
pub(crate) fn run(tree: &Tree) -> Result<(), String> {
    let mut violations = 0;
    for guard in &GUARDS {
        let caught = guard.prove()?;
        let complaints = (guard.check)(tree);
        let verdict = if complaints.is_empty() { "ok" } else { "VIOLATED" };
        println!("{:13} {verdict:8} (caught {caught} planted violations)", guard.name);
        complaints.iter().for_each(|complaint| println!("  {complaint}"));
        violations += complaints.len();
    }
    match violations {
        0 => Ok(()),
        1 => Err("1 violation of the conventions, see above".to_owned()),
        _ => Err(format!("{violations} violations of the conventions, see above")),
    }
}

impl Guard {
    /// The number of planted violations, if all of them and nothing else were reported.
    fn prove(&self) -> Result<usize, String> {
        let planted = (self.planted)();
        for (tree, words) in &planted {
            let complaints = (self.check)(tree);
            if !complaints.iter().any(|complaint| complaint.contains(words)) {
                return Err(format!(
                    "guard `{}` does not report its planted violation: expected `{words}`, got {complaints:?}",
                    self.name
                ));
            }
        }
        let alarms = (self.check)(&(self.clean)());
        if alarms.is_empty() {
            Ok(planted.len())
        } else {
            Err(format!("guard `{}` gives a false alarm: {alarms:?}", self.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{GUARDS, Guard, Tree};

    #[test]
    fn every_guard_reports_its_planted_violations() {
        for guard in &GUARDS {
            let caught = guard.prove().unwrap_or_else(|why| panic!("{why}"));
            assert!(caught > 0, "guard `{}` plants nothing", guard.name);
        }
    }

    #[test]
    fn missed_violations_and_false_alarms_are_errors() {
        let planted = || vec![(Tree::default(), "wolf")];
        let silent = Guard { name: "silent", check: |_| Vec::new(), planted, clean: Tree::default };
        let why = silent.prove().unwrap_err();
        assert_eq!(why, "guard `silent` does not report its planted violation: expected `wolf`, got []");

        let check = |_: &Tree| vec!["wolf".to_owned()];
        let noisy = Guard { name: "noisy", check, planted, clean: Tree::default };
        assert_eq!(noisy.prove().unwrap_err(), "guard `noisy` gives a false alarm: [\"wolf\"]");
    }
}
