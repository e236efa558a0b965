//! What can go wrong with machine code, and what it says.

use std::{fmt, path::PathBuf};

/// Results of the cache.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no machine code. A cache that cannot be read or written is no error: kernels are assembled then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The assembler refused a kernel.
    Assembler {
        /// The kernel.
        kernel: String,
        /// What it was to be assembled for, such as `sm_90a`.
        target: String,
        /// Everything that the assembler said.
        log: String,
    },
    /// Kernels are neither in a bundle nor in the cache, and assembling is not allowed. Never empty.
    Missing(Vec<Missing>),
    /// A folder or a program that was asked for by name cannot be used.
    Path {
        /// Where it was to be.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A setting has no such value.
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
}

/// A kernel that is nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Its name.
    pub kernel: String,
    /// What it is needed for, such as `sm_90a`.
    pub target: String,
    /// What it was configured for, in words; empty where its name says it all.
    pub configuration: String,
    /// The places that were looked at, and why their entry could not be used where there was one.
    pub looked_in: Vec<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.kernel, self.target)?;
        if !self.configuration.is_empty() {
            write!(f, " ({})", self.configuration)?;
        }
        match self.looked_in.as_slice() {
            [] => f.write_str(": no bundle and no cache to look in"),
            places => write!(f, ": not in {}", places.join(", ")),
        }
    }
}

impl fmt::Display for Error {
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

impl std::error::Error for Error {}
