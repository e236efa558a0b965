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
mod module;
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
use tilewright_kernels::KernelEntry;
use tilewright_ptx::{
    ir::Kernel,
    isa::{self, Op},
    text::ptx,
};
use tools::Tools;

/// The outcome of a gate that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// The tools are not available, which the caller allowed.
    NotRun(String),
}

/// The options of `cargo xtask gate`.
#[derive(Debug, PartialEq, Eq)]
struct GateOptions<'a> {
    bless: bool,
    if_possible: bool,
    /// Only sm_90 and the first architecture of each kernel.
    quick: bool,
    /// Only kernels whose names begin with one of these; all if empty.
    names: Vec<&'a str>,
}

impl<'a> GateOptions<'a> {
    fn parse(arguments: &[&'a str]) -> Result<Self, String> {
        const OPTIONS: [&str; 3] = ["--bless", "--if-possible", "--quick"];
        let (options, names): (Vec<&str>, Vec<&str>) =
            arguments.iter().partition(|word| word.starts_with('-'));
        if let Some(word) = options.iter().find(|word| !OPTIONS.contains(word)) {
            let all = OPTIONS.join(", ");
            return Err(format!("`{word}` is no option of `cargo xtask gate`, which has {all}"));
        }
        let has = |option| options.contains(&option);
        Ok(Self { bless: has(OPTIONS[0]), if_possible: has(OPTIONS[1]), quick: has(OPTIONS[2]), names })
    }

    /// Whether every kernel is measured for every architecture.
    fn is_complete(&self) -> bool {
        !self.quick && self.names.is_empty()
    }

    fn selects(&self, kernel: &KernelEntry, arch: u32) -> bool {
        let named = self.names.is_empty() || self.names.iter().any(|name| kernel.name.starts_with(name));
        named && (!self.quick || arch == 90 || kernel.archs.first() == Some(&arch))
    }
}

/// `cargo xtask gate [--bless] [--if-possible] [--quick] [NAME ...]`.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<Verdict, String> {
    let options = GateOptions::parse(arguments)?;
    match Tools::find(&crate::target(root)) {
        Ok(tools) => gate(root, tools, &options).map(|()| Verdict::Passed),
        Err(why) if options.if_possible => {
            println!("the gate DID NOT RUN; no kernel was assembled: {why}");
            Ok(Verdict::NotRun(why))
        }
        Err(why) => Err(format!("the gate could not run: {why}")),
    }
}

fn gate(root: &Path, tools: Tools, options: &GateOptions<'_>) -> Result<(), String> {
    println!("{}", Tools::versions());
    let assembler = Assembler::new(tools)?;
    let kernels = tilewright_kernels::all();
    let mut complaints = Vec::new();
    if options.names.is_empty() {
        match planted::prove(&assembler, &kernels) {
            Ok(caught) => println!("planted       {caught} violations, all caught"),
            Err(why) => complaints.push(why),
        }
        complaints.extend(instructions(&assembler));
    }
    let sources = parallel(&kernels, |kernel| {
        let archs = kernel.archs.iter().copied().filter(|&arch| options.selects(kernel, arch));
        module::Source::of(kernel, &archs.collect::<Vec<_>>())
    });
    let (sources, failed): (Vec<_>, Vec<_>) = sources.into_iter().partition(Result::is_ok);
    complaints.extend(failed.into_iter().filter_map(Result::err));
    let sources: Vec<module::Source> = sources.into_iter().filter_map(Result::ok).flatten().collect();
    if sources.is_empty() && complaints.is_empty() {
        return Err(format!("no kernel begins with {}", options.names.join(", ")));
    }
    let modules = module::modules(&sources, |source| &source.text);
    let measured = parallel(&modules, |module| module::measure(&assembler, module));
    let (measured, failed): (Vec<_>, Vec<_>) = measured.into_iter().flatten().partition(Result::is_ok);
    complaints.extend(failed.into_iter().filter_map(Result::err));
    let mut measured: Vec<Measured> = measured.into_iter().filter_map(Result::ok).collect();
    measured.sort_by(|a, b| (&a.kernel, a.arch).cmp(&(&b.kernel, b.arch)));
    println!("kernels       {} targets of {} kernels in all\n", sources.len(), kernels.len());
    println!("{}", table(&measured));
    for m in &measured {
        complaints.extend(m.violations().iter().map(|why| format!("{} sm_{}: {why}", m.kernel, m.arch)));
    }
    if options.bless && complaints.is_empty() {
        return write(root, &measured, options.is_complete());
    }
    complaints.extend(over_budget(root, &measured, options.is_complete()));
    complaints.iter().for_each(|complaint| println!("  {complaint}"));
    match complaints.len() {
        0 => Ok(()),
        1 => Err("1 complaint about the kernels, see above".to_owned()),
        count => Err(format!("{count} complaints about the kernels, see above")),
    }
}

/// Assembles each instruction in a kernel of its own. Returns the failures.
fn instructions(assembler: &Assembler) -> Vec<String> {
    let all = isa::all();
    let mut complaints = Vec::new();
    let mut texts = Vec::new();
    for (at, &op) in all.iter().enumerate() {
        let kernel = Kernel { name: format!("instruction{at}"), ..instructions::kernel_of(op) };
        let first = kernel.since().sm.max(op.form().since.sm); // before, an optional instruction is omitted
        match ptx(&kernel, first) {
            Ok(text) => texts.push((op, text)),
            Err(why) => complaints.push(format!("instruction {op:?}: {why}")),
        }
    }
    let failures = parallel(&module::modules(&texts, |(_, text)| text), |module| {
        if assembler.assemble(&module::joined(module.iter().map(|(_, text)| text.as_str()))).is_ok() {
            return Vec::new();
        }
        let failure = |(op, text): &&(Op, String)| {
            assembler.assemble(text).err().map(|why| format!("instruction {op:?}: {why}"))
        };
        module.iter().filter_map(failure).collect()
    });
    complaints.extend(failures.into_iter().flatten());
    println!("instructions  {} of {} assemble", all.len() - complaints.len(), all.len());
    complaints
}

fn recorded(root: &Path) -> Result<Budgets, String> {
    let text = std::fs::read_to_string(root.join(budgets::FILE));
    text.map_err(|why| format!("{}: {why}", budgets::FILE)).and_then(|text| Budgets::parse(&text))
}

/// Kernels over their budget. Kernels below their budget are printed only.
fn over_budget(root: &Path, measured: &[Measured], complete: bool) -> Vec<String> {
    let mut budgets = match recorded(root) {
        Ok(budgets) => budgets,
        Err(why) => return vec![why],
    };
    let now = Budgets::of(measured);
    if !complete {
        budgets.retain_keys_of(&now);
    }
    let broken = budgets.broken_by(&now);
    match (broken.len(), budgets.loosened_by(&now)) {
        (0, 0) => println!("budgets       met exactly"),
        (0, count) => {
            println!(
                "budgets       {count} kernels need less; `cargo xtask gate --bless` lowers the budgets"
            );
        }
        _ => println!("budgets       EXCEEDED or missing; if intended, add `--bless` to the command"),
    }
    broken
}

/// Writes the measured numbers as the budgets, and the golden PTX. Budgets of kernels that were not measured stay.
fn write(root: &Path, measured: &[Measured], complete: bool) -> Result<(), String> {
    let path = root.join(budgets::FILE);
    let mut budgets = if complete { Budgets::default() } else { recorded(root)? };
    budgets.extend(Budgets::of(measured));
    std::fs::write(&path, budgets.text()).map_err(|why| format!("{}: {why}", budgets::FILE))?;
    println!("blessed       {}, and {} golden files that changed", budgets::FILE, golden::bless(root)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{GateOptions, run};
    use std::path::Path;

    #[test]
    fn unknown_options_are_errors() {
        let why = run(Path::new("."), &["--bless", "--possible"]).unwrap_err();
        let options = "--bless, --if-possible, --quick";
        assert_eq!(why, format!("`--possible` is no option of `cargo xtask gate`, which has {options}"));
    }

    #[test]
    fn options_select_kernels_and_architectures() {
        let kernels = tilewright_kernels::all();
        let selected = |arguments: &[&str]| {
            let options = GateOptions::parse(arguments).unwrap();
            let pairs =
                kernels.iter().flat_map(|kernel| kernel.archs.iter().map(move |&arch| (kernel, arch)));
            let pairs = pairs.filter(|(kernel, arch)| options.selects(kernel, *arch));
            pairs.map(|(kernel, arch)| (kernel.name.clone(), arch)).collect::<Vec<_>>()
        };
        assert_eq!(selected(&[]).len(), kernels.iter().map(|kernel| kernel.archs.len()).sum::<usize>());
        let quick = selected(&["--quick"]);
        assert!(kernels.iter().all(|kernel| quick.iter().any(|(name, _)| *name == kernel.name)));
        let named = selected(&["--quick", "rmsnorm_bf16_"]);
        let names = ["rmsnorm_bf16_bf16_8_128x4", "rmsnorm_bf16_to_e4m3_bf16_8_128x4_scaled"];
        let expected: Vec<_> =
            names.iter().flat_map(|name| [80, 90].map(|arch| ((*name).to_owned(), arch))).collect();
        assert_eq!(named, expected);
    }
}
