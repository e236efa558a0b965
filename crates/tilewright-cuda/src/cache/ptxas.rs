//! `ptxas` of the CUDA toolkit, for making bundles on machines without a GPU. Not used at run time.

use super::{Assembler, CacheError, Result, Source};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The program `ptxas`.
#[derive(Debug, Clone)]
pub struct Ptxas {
    path: PathBuf,
    identity: String,
}

impl Ptxas {
    /// The program at `path`; a name without a folder is searched on `PATH`.
    ///
    /// # Errors
    /// If it does not run, or is another program.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let failed = |why: String| CacheError::Path { path: path.clone(), why };
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

/// The output of both streams, without the name of the temporary file.
fn said(output: &Output, file: &Path) -> String {
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    text.concat().replace(&file.display().to_string(), "the kernel's PTX").trim().to_owned()
}
