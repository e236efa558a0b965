//! Errors of the kernel cache.

use std::{fmt, path::PathBuf};

/// Results of the cache.
pub type Result<T> = std::result::Result<T, CacheError>;

/// The reason why machine code is unavailable. An unreadable or read-only cache is no error: kernels are assembled instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheError {
    /// The assembler rejected a kernel.
    Assembler {
        /// The kernel.
        kernel: String,
        /// Its target, such as `sm_90a`.
        target: String,
        /// The whole log of the assembler.
        log: String,
    },
    /// Kernels are neither in a bundle nor in the cache, and assembling is disabled. Never empty.
    Missing(Vec<MissingKernel>),
    /// A configured folder or program is unusable.
    Path {
        /// Its path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A setting has an invalid value.
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
}

/// A kernel that was not found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingKernel {
    /// Its name.
    pub kernel: String,
    /// Its target, such as `sm_90a`.
    pub target: String,
    /// The description of its configuration; empty if the name is sufficient.
    pub configuration: String,
    /// The searched folders, each with the reason if its entry was unusable.
    pub searched: Vec<String>,
}

impl fmt::Display for MissingKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.kernel, self.target)?;
        if !self.configuration.is_empty() {
            write!(f, " ({})", self.configuration)?;
        }
        match self.searched.as_slice() {
            [] => f.write_str(": no bundle and no cache to look in"),
            folders => write!(f, ": not in {}", folders.join(", ")),
        }
    }
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Assembler { kernel, target, log } => {
                write!(f, "kernel {kernel} for {target}: the assembler refused it: {log}")
            }
            Self::Missing(missing) => {
                let kernels = if missing.len() == 1 { "kernel" } else { "kernels" };
                write!(
                    f,
                    "{} {kernels} would have to be assembled, which is not allowed here:",
                    missing.len()
                )?;
                missing.iter().try_for_each(|missing| write!(f, "\n  {missing}"))
            }
            Self::Path { path, why } => write!(f, "kernels: {}: {why}", path.display()),
            Self::Setting { name, value, expected } => {
                write!(f, "kernel cache: {name} = {value:?}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for CacheError {}
