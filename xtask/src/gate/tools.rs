//! The assembler and the disassembler: found in `target/cuda-tools` or on PATH, else installed from the Python registry.
//!
//! Neither needs a GPU. Budgets are measured with one version of the assembler, so that one on PATH counts if it is that one.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The Python packages, and the versions that everything is measured with. The registry has no older disassembler; it reads
/// what the assembler writes.
const PACKAGES: [Package; 2] = [
    Package { tool: "ptxas", name: "nvidia-cuda-nvcc", version: "13.0.88" },
    Package { tool: "nvdisasm", name: "nvidia-cuda-nvdisasm", version: "13.2.51" },
];

/// A tool, and where it comes from.
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
    /// The tools of `output`, the folder of build outputs, or of PATH, or fresh ones in `output`; else why there are none.
    pub(crate) fn find(output: &Path) -> Result<Self, String> {
        let folder = output.join("cuda-tools");
        if let Some(tools) = Self::installed(&folder).or_else(Self::on_path) {
            return Ok(tools);
        }
        install(&folder)?;
        Self::installed(&folder)
            .ok_or_else(|| format!("the tools were installed in {}, but do not run", folder.display()))
    }

    /// Those of the environment in `folder`.
    fn installed(folder: &Path) -> Option<Self> {
        let pythons = std::fs::read_dir(folder.join("lib")).ok()?;
        let mut folders = pythons.flatten().map(|python| python.path().join("site-packages/nvidia/cu13/bin"));
        folders.find_map(|bin| Self::of(|tool| bin.join(tool)))
    }

    fn on_path() -> Option<Self> {
        Self::of(|tool| PathBuf::from(tool))
    }

    /// The tools at these paths, if both are there in the right versions.
    fn of(path: impl Fn(&str) -> PathBuf) -> Option<Self> {
        let [ptxas, nvdisasm] = PACKAGES.map(|package| {
            let path = path(package.tool);
            (version(&path)? == package.version).then_some(path)
        });
        Some(Self { ptxas: ptxas?, nvdisasm: nvdisasm? })
    }

    /// What measures.
    pub(crate) fn versions() -> String {
        PACKAGES.map(|package| format!("{} {}", package.tool, package.version)).join(", ")
    }
}

/// What a tool says of itself.
fn version(tool: &Path) -> Option<String> {
    let output = Command::new(tool).arg("--version").output().ok()?;
    Some(stated(&String::from_utf8_lossy(&output.stdout))?.to_owned())
}

/// `13.0.88` of `Cuda compilation tools, release 13.0, V13.0.88`.
fn stated(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once(", V")?;
    rest.split_whitespace().next()
}

/// Makes a Python environment in `folder` and installs the packages there; shows what it does.
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
    // the compiler's own parts, which its package depends on, are not needed
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]).args(wanted);
    succeed(pip, "pip install")
}

/// Runs a command whose output is shown; what it says last on its error stream is why it failed.
fn succeed(mut command: Command, name: &str) -> Result<(), String> {
    let child = command.stderr(Stdio::piped()).spawn();
    let ended = child.and_then(Child::wait_with_output);
    let ended = ended.map_err(|why| format!("`{name}` does not start: {why}"))?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
    Err(format!("`{name}` ended with {}: {}", ended.status, last.trim()))
}

#[cfg(test)]
mod tests {
    use super::{Tools, stated, succeed};
    use std::{path::Path, process::Command};

    #[test]
    fn a_version_is_read_from_what_a_tool_says() {
        let text =
            "ptxas: Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.88\nBuild x\n";
        assert_eq!(stated(text), Some("13.0.88"));
        assert_eq!(stated("GNU assembler version 2.40"), None);
    }

    #[cfg(unix)]
    #[test]
    fn an_installation_that_fails_says_why() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo trying >&2; echo 'no such package' >&2; exit 3"]);
        let why = succeed(command, "pip install").unwrap_err();
        assert_eq!(why, "`pip install` ended with exit status: 3: no such package");
        let why = succeed(Command::new("no/such/python"), "pip install").unwrap_err();
        assert!(why.starts_with("`pip install` does not start: "), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn tools_of_another_version_are_none() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("lib/python3.11/site-packages/nvidia/cu13/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let write = |tool: &str, version: &str| {
            // written whole, then renamed: a file that is open for writing cannot be executed
            let (draft, path) = (bin.join("draft"), bin.join(tool));
            std::fs::write(&draft, format!("#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n"))
                .unwrap();
            std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::rename(&draft, &path).unwrap();
        };
        assert_eq!(Tools::installed(Path::new("no/such/folder")), None);
        write("ptxas", "13.0.88");
        assert_eq!(Tools::installed(folder.path()), None, "one tool is not there");
        write("nvdisasm", "12.8.90");
        assert_eq!(Tools::installed(folder.path()), None, "one tool is old");
        write("nvdisasm", "13.2.51");
        let tools = Tools::installed(folder.path()).unwrap();
        assert_eq!(tools.ptxas, bin.join("ptxas"));
    }
}
