//! Bundles: folders of machine code assembled ahead of time, usable with any driver.
//!
//! Their keys exclude the assembler: `ptxas` makes a bundle on a machine without a GPU, and any driver reads it.

use super::{
    Assembler, CacheError, Result, Source, folder::Folder, lookup::assemble_code, parallel, unusable,
};
use std::{collections::BTreeSet, path::Path};

/// Opens an existing bundle.
pub(super) fn open(path: &Path) -> Result<Folder> {
    let folder = Folder::new(path);
    let no_bundle =
        |why: &str| CacheError::Path { path: path.to_owned(), why: format!("it is no bundle: {why}") };
    if !path.is_dir() {
        return Err(no_bundle("there is no such folder"));
    }
    match folder.is_empty() {
        Ok(false) => Ok(folder),
        Ok(true) => Err(no_bundle("there is no kernel in it")),
        Err(why) => Err(no_bundle(&why.to_string())),
    }
}

/// Assembles kernels into `path`, an empty or new folder, on `workers` threads. `done` is called from any of them after each
/// kernel. Returns the total bytes of machine code.
///
/// Kernels with equal text and target share one entry.
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
        let code = assemble_code(source, assembler)?;
        folder.write(source.key(), &code).map_err(failed)?;
        done(source);
        Ok(code.cubin.len() as u64)
    };
    parallel::map(&different, workers, one).into_iter().sum()
}
