//! The assembler and the disassembler, from `target/cuda-tools` or PATH, or installed from PyPI.
//!
//! Neither needs a GPU. Budgets are measured with a fixed version; a different version on PATH is ignored.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The Python packages and their fixed versions. PyPI has no older disassembler; this one reads the assembler's output.
const PACKAGES: [Package; 2] = [
    Package { tool: "ptxas", name: "nvidia-cuda-nvcc", version: "13.0.88" },
    Package { tool: "nvdisasm", name: "nvidia-cuda-nvdisasm", version: "13.2.51" },
];

/// A tool and its Python package.
struct Package {
    tool: &'static str,
    name: &'static str,
    version: &'static str,
}

/// Both tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tools {
    pub(crate) ptxas: PathBuf,
    pub(crate) nvdisasm: PathBuf,
}

impl Tools {
    /// Finds the tools in `output` (the folder of build outputs) or on PATH, or installs them into `output`.
    pub(crate) fn find(output: &Path) -> Result<Self, String> {
        let folder = output.join("cuda-tools");
        if let Some(tools) = Self::installed(&folder).or_else(Self::on_path) {
            return Ok(tools);
        }
        install(&folder)?;
        Self::installed(&folder)
            .ok_or_else(|| format!("the tools were installed in {}, but do not run", folder.display()))
    }

    /// The tools of the Python environment in `folder`.
    fn installed(folder: &Path) -> Option<Self> {
        let pythons = std::fs::read_dir(folder.join("lib")).ok()?;
        let mut folders = pythons.flatten().map(|python| python.path().join("site-packages/nvidia/cu13/bin"));
        folders.find_map(|bin| Self::of(|tool| bin.join(tool)))
    }

    fn on_path() -> Option<Self> {
        Self::of(|tool| PathBuf::from(tool))
    }

    /// The tools at these paths, if both exist with the required versions.
    fn of(path: impl Fn(&str) -> PathBuf) -> Option<Self> {
        let [ptxas, nvdisasm] = PACKAGES.map(|package| {
            let path = path(package.tool);
            (version(&path)? == package.version).then_some(path)
        });
        Some(Self { ptxas: ptxas?, nvdisasm: nvdisasm? })
    }

    /// The tools with their versions.
    pub(crate) fn versions() -> String {
        PACKAGES.map(|package| format!("{} {}", package.tool, package.version)).join(", ")
    }
}

/// The version printed by a tool.
fn version(tool: &Path) -> Option<String> {
    let output = Command::new(tool).arg("--version").output().ok()?;
    Some(stated(&String::from_utf8_lossy(&output.stdout))?.to_owned())
}

/// `13.0.88` of `Cuda compilation tools, release 13.0, V13.0.88`.
fn stated(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once(", V")?;
    rest.split_whitespace().next()
}

/// Creates a Python environment in `folder` and installs the packages; prints the progress.
fn install(folder: &Path) -> Result<(), String> {
    let wanted = PACKAGES.map(|package| format!("{}=={}", package.name, package.version));
    println!(
        "installing {} into {} (42 MB to download, 140 MB on disk)",
        Tools::versions(),
        folder.display()
    );
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(folder);
    succeed(venv, "python3 -m venv")?;
    let mut pip = Command::new(folder.join("bin/python"));
    // the package's dependencies, which contain the compiler, are not needed
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]).args(wanted);
    succeed(pip, "pip install")
}

/// Runs a command and shows its output. The error is the last line of stderr.
fn succeed(mut command: Command, name: &str) -> Result<(), String> {
    let child = command.stderr(Stdio::piped()).spawn();
    let ended = child.and_then(Child::wait_with_output);
    let ended = ended.map_err(|why| format!("`{name}` does not start: {why}"))?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no error message");
    Err(format!("`{name}` ended with {}: {}", ended.status, last.trim()))
}

#[cfg(test)]
mod tests {
    use super::{Tools, stated, succeed};
    use std::{path::Path, process::Command};

    #[test]
    fn the_version_is_parsed() {
        let text =
            "ptxas: Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.88\nBuild x\n";
        assert_eq!(stated(text), Some("13.0.88"));
        assert_eq!(stated("GNU assembler version 2.40"), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_failed_installation_reports_its_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo trying >&2; echo 'no such package' >&2; exit 3"]);
        let why = succeed(command, "pip install").unwrap_err();
        assert_eq!(why, "`pip install` ended with exit status: 3: no such package");
        let why = succeed(Command::new("no/such/python"), "pip install").unwrap_err();
        assert!(why.starts_with("`pip install` does not start: "), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn tools_of_another_version_are_ignored() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("lib/python3.11/site-packages/nvidia/cu13/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let write = |tool: &str, version: &str| {
            // write, then rename: a file open for writing cannot be executed
            let (draft, path) = (bin.join("draft"), bin.join(tool));
            std::fs::write(&draft, format!("#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n"))
                .unwrap();
            std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::rename(&draft, &path).unwrap();
        };
        assert_eq!(Tools::installed(Path::new("no/such/folder")), None);
        write("ptxas", "13.0.88");
        assert_eq!(Tools::installed(folder.path()), None, "one tool is missing");
        write("nvdisasm", "12.8.90");
        assert_eq!(Tools::installed(folder.path()), None, "one tool is old");
        write("nvdisasm", "13.2.51");
        let tools = Tools::installed(folder.path()).unwrap();
        assert_eq!(tools.ptxas, bin.join("ptxas"));
    }
}
