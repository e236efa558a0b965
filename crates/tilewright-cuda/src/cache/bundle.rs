//! Bundles: folders of machine code assembled ahead of time, usable with any driver.
//!
//! Their keys exclude the assembler: `ptxas` makes a bundle on a machine without a GPU, and any driver reads it.

use super::{Assembler, CacheError, Code, Folder, Result, Source, lookup::assemble_code, parallel, unusable};
use std::{collections::BTreeSet, path::Path};

/// Opens an existing bundle.
pub(super) fn open(path: &Path) -> Result<Folder> {
    let folder = Folder::new(path);
    let no_bundle =
        |why: &str| CacheError::Path { path: path.to_owned(), why: format!("it is no bundle: {why}") };
    if !path.is_dir() {
        return Err(no_bundle("there is no such folder"));
    }
    match folder.has_entry_file() {
        Ok(true) => Ok(folder),
        Ok(false) => Err(no_bundle("there is no kernel in it")),
        Err(why) => Err(no_bundle(&why.to_string())),
    }
}

/// The content of a bundle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BundleContent {
    /// Number of kernels.
    pub kernels: usize,
    /// Number of files that are damaged.
    pub damaged: usize,
    /// Their targets, such as `sm_90a`.
    pub targets: BTreeSet<String>,
    /// The identities of their assemblers.
    pub assemblers: BTreeSet<String>,
    /// A kernel for each target.
    pub samples: Vec<Code>,
}

impl BundleContent {
    /// Reads all kernels of a bundle.
    ///
    /// # Errors
    /// If the folder is not a bundle.
    pub fn read(path: &Path) -> Result<Self> {
        let folder = open(path)?;
        let mut content = Self::default();
        for entry in folder.list().map_err(|why| unusable(&folder, &why))? {
            let Ok(code) = entry.code else {
                content.damaged += 1;
                continue;
            };
            content.kernels += 1;
            content.assemblers.insert(code.assembler.clone());
            if content.targets.insert(code.target.clone()) {
                content.samples.push(code);
            }
        }
        Ok(content)
    }
}

/// Assembles kernels into `path`, an empty or new folder, on `workers` threads. `done` is called from any of them after each
/// kernel. Returns the total bytes of machine code.
///
/// Kernels with equal text and target share one entry. The code has no lines of the source.
///
/// # Errors
/// If the folder cannot be created or written or is not empty; if the assembler rejects a kernel.
pub fn make_bundle(
    path: &Path,
    sources: &[Source],
    assembler: &dyn Assembler,
    workers: usize,
    done: &(dyn Fn(&Source) + Sync),
) -> Result<u64> {
    let folder = Folder::new(path);
    let failed = |why: std::io::Error| unusable(&folder, &why);
    std::fs::create_dir_all(path).map_err(failed)?;
    if std::fs::read_dir(path).map_err(failed)?.next().is_some() {
        let why = "it is not empty; a bundle is made in a folder of its own".to_owned();
        return Err(CacheError::Path { path: path.to_owned(), why });
    }
    let mut keys = BTreeSet::new();
    let different: Vec<&Source> = sources.iter().filter(|source| keys.insert(source.key())).collect();
    let one = |source: &&Source| {
        let code = assemble_code(&source.without_source_lines(), assembler)?;
        folder.write(source.key(), &code).map_err(failed)?;
        done(source);
        Ok(code.cubin.len() as u64)
    };
    parallel::map(&different, workers, one).into_iter().sum()
}
