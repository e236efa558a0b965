//! The kernel gate: `cargo xtask gate` assembles every instruction and every kernel and checks the machine code.
//!
//! ```text
//! tools        finds or installs ptxas and nvdisasm; no GPU is needed
//! planted      proves that the gate detects planted violations
//! instructions assembles each instruction for the first target that supports it
//! kernels      assembles each kernel for each of its architectures: no spills, no serialized wgmma, softmax overlaps an MMA
//! budgets      compares registers and instruction counts with budgets.csv
//! ```

mod assemble;
mod budgets;
mod flow;
mod golden;
mod instructions;
mod measure;
mod overlap;
mod planted;
mod report;
mod sass;
mod tools;

use assemble::Assembler;
pub(crate) use assemble::parallel;
use budgets::Budgets;
use measure::{Measured, table};
use std::path::Path;
use tilewright_ptx::{isa, text::ptx};
use tools::Tools;

/// The outcome of a gate that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// The tools are not available, which the caller allowed.
    NotRun(String),
}

/// `cargo xtask gate [--bless] [--if-possible]`.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<Verdict, String> {
    const OPTIONS: [&str; 2] = ["--bless", "--if-possible"];
    if let Some(word) = arguments.iter().find(|word| !OPTIONS.contains(word)) {
        return Err(format!("`{word}` is no option of `cargo xtask gate`, which has {}", OPTIONS.join(", ")));
    }
    let has = |option| arguments.contains(&option);
    match Tools::find(&crate::target(root)) {
        Ok(tools) => gate(root, tools, has("--bless")).map(|()| Verdict::Passed),
        Err(why) if has("--if-possible") => {
            println!("the gate DID NOT RUN; no kernel was assembled: {why}");
            Ok(Verdict::NotRun(why))
        }
        Err(why) => Err(format!("the gate could not run: {why}")),
    }
}

fn gate(root: &Path, tools: Tools, bless: bool) -> Result<(), String> {
    println!("{}", Tools::versions());
    let assembler = Assembler::new(tools)?;
    let kernels = tilewright_kernels::all();
    let mut complaints = Vec::new();
    match planted::prove(&assembler, &kernels) {
        Ok(caught) => println!("planted       {caught} violations, all caught"),
        Err(why) => complaints.push(why),
    }
    complaints.extend(instructions(&assembler));
    let pairs: Vec<_> =
        kernels.iter().flat_map(|kernel| kernel.archs.iter().map(move |&arch| (kernel, arch))).collect();
    let measured = parallel(&pairs, |&(kernel, arch)| {
        Measured::of(&assembler, kernel, arch).map_err(|why| format!("{} sm_{arch}: {why}", kernel.name))
    });
    let (measured, failed): (Vec<_>, Vec<_>) = measured.into_iter().partition(Result::is_ok);
    complaints.extend(failed.into_iter().filter_map(Result::err));
    let measured: Vec<Measured> = measured.into_iter().filter_map(Result::ok).collect();
    println!("kernels       {} for {} targets\n", kernels.len(), pairs.len());
    println!("{}", table(&measured));
    for m in &measured {
        complaints.extend(m.violations().iter().map(|why| format!("{} sm_{}: {why}", m.kernel, m.arch)));
    }
    if bless && complaints.is_empty() {
        return write(root, &measured);
    }
    complaints.extend(over_budget(root, &measured));
    complaints.iter().for_each(|complaint| println!("  {complaint}"));
    match complaints.len() {
        0 => Ok(()),
        1 => Err("1 complaint about the kernels, see above".to_owned()),
        count => Err(format!("{count} complaints about the kernels, see above")),
    }
}

/// Assembles each instruction alone. Returns the failures.
fn instructions(assembler: &Assembler) -> Vec<String> {
    let all = isa::all();
    let complaints = parallel(&all, |&op| {
        let kernel = instructions::kernel_of(op);
        let text = ptx(&kernel, kernel.since().sm).map_err(|why| why.to_string());
        text.and_then(|text| assembler.assemble(&text)).err().map(|why| format!("instruction {op:?}: {why}"))
    });
    let complaints: Vec<String> = complaints.into_iter().flatten().collect();
    println!("instructions  {} of {} assemble", all.len() - complaints.len(), all.len());
    complaints
}

/// Kernels over their budget. Kernels below their budget are printed only.
fn over_budget(root: &Path, measured: &[Measured]) -> Vec<String> {
    let text = std::fs::read_to_string(root.join(budgets::FILE));
    let budgets =
        text.map_err(|why| format!("{}: {why}", budgets::FILE)).and_then(|text| Budgets::parse(&text));
    let budgets = match budgets {
        Ok(budgets) => budgets,
        Err(why) => return vec![why],
    };
    let now = Budgets::of(measured);
    let broken = budgets.broken_by(&now);
    match (broken.len(), budgets.loosened_by(&now)) {
        (0, 0) => println!("budgets       met exactly"),
        (0, count) => {
            println!(
                "budgets       {count} kernels need less; `cargo xtask gate --bless` lowers the budgets"
            );
        }
        _ => println!("budgets       EXCEEDED; if intended, run `cargo xtask gate --bless`"),
    }
    broken
}

/// Writes the measured numbers as the budgets, and the golden PTX.
fn write(root: &Path, measured: &[Measured]) -> Result<(), String> {
    let path = root.join(budgets::FILE);
    std::fs::write(&path, Budgets::of(measured).text()).map_err(|why| format!("{}: {why}", budgets::FILE))?;
    println!("blessed       {}, and {} golden files that changed", budgets::FILE, golden::bless(root)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::run;
    use std::path::Path;

    #[test]
    fn unknown_options_are_errors() {
        let why = run(Path::new("."), &["--bless", "--possible"]).unwrap_err();
        assert_eq!(why, "`--possible` is no option of `cargo xtask gate`, which has --bless, --if-possible");
    }
}
