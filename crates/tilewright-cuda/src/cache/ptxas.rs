//! The toolkit's assembler, for bundles that are made where there is no GPU. Nothing needs it at run time.

use super::{Assembler, Error, Result, Source};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// `ptxas`, a program of the CUDA toolkit.
#[derive(Debug, Clone)]
pub struct Ptxas {
    path: PathBuf,
    identity: String,
}

impl Ptxas {
    /// The program at `path`; a name without a folder is looked for on `PATH`.
    ///
    /// # Errors
    /// When it does not run, or is another program.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let failed = |why: String| Error::Path { path: path.clone(), why };
        let output = Command::new(&path).arg("--version").output();
        let output = output.map_err(|why| failed(format!("it does not start: {why}")))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let version = said.split_once(", V").and_then(|(_, rest)| rest.split_whitespace().next());
        let version = version.filter(|_| said.contains("ptxas"));
        let version = version.ok_or_else(|| failed("it does not say which ptxas it is".to_owned()))?;
        Ok(Self { identity: format!("ptxas {version}"), path })
    }
}

impl Assembler for Ptxas {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String> {
        let folder = tempfile::tempdir().map_err(|why| format!("no folder for temporary files: {why}"))?;
        let at = |path: &Path, why: std::io::Error| format!("{}: {why}", path.display());
        let (ptx, cubin) = (folder.path().join("kernel.ptx"), folder.path().join("kernel.cubin"));
        std::fs::write(&ptx, source.ptx()).map_err(|why| at(&ptx, why))?;
        let mut command = Command::new(&self.path);
        command.arg(format!("-arch={}", source.target())).arg(&ptx).arg("-o").arg(&cubin);
        let output = command.output().map_err(|why| at(&self.path, why))?;
        if !output.status.success() {
            return Err(format!("{} ended with {}: {}", self.identity, output.status, said(&output, &ptx)));
        }
        std::fs::read(&cubin).map_err(|why| at(&cubin, why))
    }
}

/// What a program said on both streams, without the name of a temporary file.
fn said(output: &Output, file: &Path) -> String {
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    text.concat().replace(&file.display().to_string(), "the kernel's PTX").trim().to_owned()
}
