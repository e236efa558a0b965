//! PTX of kernels in modules: nvdisasm starts for a fifth of a second, longer than it takes for most kernels.
//!
//! 1. [`Source::of`] prints a kernel for its architectures.
//! 2. [`modules`] groups texts with the same version and target.
//! 3. [`measure`] assembles a module, and its kernels one by one if the assembler has a complaint or remark.

use super::{assemble::Assembler, measure::Measured};
use std::collections::{BTreeMap, HashMap};
use tilewright_kernels::KernelEntry;
use tilewright_ptx::{
    ir::Kernel,
    text::{code_lines, ptx},
};

/// The maximum number of kernels in a module; few, so that all cores have modules.
const KERNELS: usize = 8;
const ENTRY: &str = ".visible .entry ";

/// A kernel as PTX.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The name of its entry function.
    pub(crate) kernel: String,
    pub(crate) arch: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub(crate) shared: u64,
    /// Whether it must overlap softmax with an MMA.
    pub(crate) promises: bool,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn new(kernel: &Kernel, arch: u32, promises: bool, text: String) -> Self {
        let shared = kernel.shared_layout().1 as u64;
        Self { kernel: kernel.name.clone(), arch, shared, promises, text }
    }

    /// Builds a kernel once, and prints it for each of these architectures under the unique name of its entry.
    pub(crate) fn of(entry: &KernelEntry, archs: &[u32]) -> Result<Vec<Self>, String> {
        let kernel = (entry.build)().map_err(|why| format!("{}: {why}", entry.name))?;
        let kernel = Kernel { name: entry.name.clone(), ..kernel };
        let print = |&arch: &u32| {
            let text = ptx(&kernel, arch).map_err(|why| format!("{} sm_{arch}: {why}", entry.name))?;
            Ok(Self::new(&kernel, arch, entry.overlap, text))
        };
        archs.iter().map(print).collect()
    }
}

/// Groups items whose PTX has the same version, target and shared memory.
pub(crate) fn modules<T>(items: &[T], text: impl Fn(&T) -> &str) -> Vec<Vec<&T>> {
    let mut by_head = BTreeMap::<&str, Vec<&T>>::new();
    for item in items {
        by_head.entry(text(item).split(ENTRY).next().unwrap_or_default()).or_default().push(item);
    }
    by_head.values().flat_map(|items| items.chunks(KERNELS).map(<[_]>::to_vec)).collect()
}

/// One text of texts with the same head, without source lines, whose numbers of files differ.
pub(crate) fn joined<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let mut module = String::new();
    for text in texts {
        let entry = if module.is_empty() { 0 } else { text.find(ENTRY).unwrap_or_default() };
        module.extend(code_lines(&text[entry..]));
    }
    module
}

/// Measures the kernels of a module.
pub(crate) fn measure(assembler: &Assembler, module: &[&Source]) -> Vec<Result<Measured, String>> {
    if let Some(measured) = together(assembler, module) {
        return measured.into_iter().map(Ok).collect();
    }
    let alone = |source: &&Source| {
        let named = |why| format!("{} sm_{}: {why}", source.kernel, source.arch);
        Measured::of(assembler, source).map_err(named)
    };
    module.iter().map(alone).collect()
}

/// The kernels of a module without complaint or remark of the assembler, which names kernels in only some of them.
fn together(assembler: &Assembler, module: &[&Source]) -> Option<Vec<Measured>> {
    let cubin = assembler.assemble(&joined(module.iter().map(|source| source.text.as_str()))).ok()?;
    if cubin.report.contains("(C") || cubin.report.contains("warning") {
        return None;
    }
    let code = assembler.disassemble(&cubin).ok()?;
    let (reports, codes) =
        (parts(&cubin.report, "Compiling entry function '"), parts(&code, "\t.section\t.text."));
    let measured = |source: &&Source| {
        let name = source.kernel.as_str();
        Measured::parse(source, reports.get(name)?, codes.get(name)?).ok()
    };
    module.iter().map(measured).collect()
}

/// The parts of a text that begin with these words and a name, by name.
fn parts<'a>(text: &'a str, words: &str) -> HashMap<&'a str, &'a str> {
    let name = |part: &'a str| part.split(['\'', ',']).next().unwrap_or_default();
    text.split(words).skip(1).map(|part| (name(part), part)).collect()
}

#[cfg(test)]
mod tests {
    use super::{joined, modules, parts};

    #[test]
    fn texts_with_the_same_head_form_modules() {
        let text = |target: u32, name: usize| {
            format!(
                ".target sm_{target}\n.visible .entry k{name}(\n)\n    .loc 1 2 3\n    ret;\n}}\n.file 1 \"a.rs\"\n"
            )
        };
        let mut texts: Vec<String> = (0..9).map(|at| text(80, at)).collect();
        texts.insert(1, text(90, 9));
        let modules = modules(&texts, |text| text);
        let sizes: Vec<usize> = modules.iter().map(Vec::len).collect();
        assert_eq!(sizes, [8, 1, 1]);
        let module = joined(modules[0][..2].iter().map(|text| text.as_str()));
        let entries = [0, 1].map(|at| format!(".visible .entry k{at}(\n)\n    ret;\n}}\n")).concat();
        assert_eq!(module, format!(".target sm_80\n{entries}"));
    }

    #[test]
    fn parts_begin_at_their_names() {
        let text = "0 bytes gmem\nCompiling entry function 'a' for 'sm_90'\nUsed 8\nCompiling entry function 'b' for 'sm_90'\nUsed 9\n";
        let parts = parts(text, "Compiling entry function '");
        assert_eq!(parts.len(), 2);
        assert_eq!((parts["a"], parts["b"]), ("a' for 'sm_90'\nUsed 8\n", "b' for 'sm_90'\nUsed 9\n"));
    }
}
