//! Runs the assembler on PTX and the disassembler on the cubin.

use super::tools::Tools;
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The tools, and a folder for intermediate files.
#[derive(Debug)]
pub(crate) struct Assembler {
    tools: Tools,
    folder: tempfile::TempDir,
    files: AtomicUsize,
}

/// A kernel as machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cubin {
    path: PathBuf,
    /// The output of the assembler.
    pub(crate) report: String,
}

impl Assembler {
    pub(crate) fn new(tools: Tools) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|why| format!("no folder for temporary files: {why}"))?;
        Ok(Self { tools, folder, files: AtomicUsize::new(0) })
    }

    /// Assembles PTX for the target that it names.
    ///
    /// # Errors
    /// The output of the assembler.
    pub(crate) fn assemble(&self, ptx: &str) -> Result<Cubin, String> {
        let target = target(ptx).ok_or("the PTX names no target")?;
        let stem = self.folder.path().join(self.files.fetch_add(1, Ordering::Relaxed).to_string());
        let (source, path) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
        std::fs::write(&source, ptx).map_err(|why| format!("{}: {why}", source.display()))?;
        let mut ptxas = Command::new(&self.tools.ptxas);
        ptxas.arg("-v").arg(format!("-arch={target}")).arg(&source).arg("-o").arg(&path);
        let (out, err) = output(ptxas, "ptxas", &source)?;
        Ok(Cubin { path, report: out + &err })
    }

    pub(crate) fn disassemble(&self, cubin: &Cubin) -> Result<String, String> {
        let mut nvdisasm = Command::new(&self.tools.nvdisasm);
        nvdisasm.args(["-c", "--no-dataflow"]).arg(&cubin.path); // labels of branches do not need it
        Ok(output(nvdisasm, "nvdisasm", &cubin.path)?.0)
    }
}

/// `sm_90a` of `.target sm_90a`.
fn target(ptx: &str) -> Option<&str> {
    ptx.lines().find_map(|line| line.strip_prefix(".target "))
}

/// Runs a command. Returns stdout and stderr, without the name of the temporary file.
fn output(mut command: Command, name: &str, file: &Path) -> Result<(String, String), String> {
    let output = command.output().map_err(|why| format!("{name} does not start: {why}"))?;
    let text = |bytes: Vec<u8>| {
        String::from_utf8_lossy(&bytes).replace(&file.display().to_string(), "the kernel's PTX")
    };
    let (out, err) = (text(output.stdout), text(output.stderr));
    if output.status.success() {
        Ok((out, err))
    } else {
        let said = [out.trim(), err.trim()].join("\n");
        Err(format!("{name} ended with {}: {}", output.status, said.trim()))
    }
}

/// Maps `work` over the items on all cores; the results are in the order of the items.
pub(crate) fn parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let Some((at, item)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).map(|item| (at, item))
        } {
            done.push((at, work(item)));
        }
        done
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("work does not panic")).collect()
    });
    all.sort_by_key(|&(at, _)| at);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::{output, parallel, target};
    use std::{path::Path, process::Command};

    #[test]
    fn the_target_is_parsed() {
        assert_eq!(target(".version 8.0\n.target sm_90a\n.address_size 64\n"), Some("sm_90a"));
        assert_eq!(target("// .target sm_90a\n"), None);
    }

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(parallel(&items, |at| at * at), items.iter().map(|at| at * at).collect::<Vec<_>>());
    }

    #[cfg(unix)]
    #[test]
    fn a_failed_command_reports_its_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'a/b.ptx, line 3: no such opcode' >&2; exit 7"]);
        let why = output(command, "ptxas", Path::new("a/b.ptx")).unwrap_err();
        assert_eq!(why, "ptxas ended with exit status: 7: the kernel's PTX, line 3: no such opcode");
    }
}
