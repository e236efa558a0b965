//! Machine code made ahead of time: a folder of entries that anything can assemble and that every driver may take.
//!
//! Its keys leave out what assembled an entry: a bundle is made by `ptxas` on a machine without a GPU, and read where some driver is.

use super::{Assembler, Error, Result, Source, folder::Folder, made, side_by_side, unusable};
use std::{collections::BTreeSet, path::Path};

/// A folder that has to be a bundle.
pub(super) fn open(path: &Path) -> Result<Folder> {
    let folder = Folder::new(path);
    let no_bundle = |why: &str| Error::Path { path: path.to_owned(), why: format!("it is no bundle: {why}") };
    if !path.is_dir() {
        return Err(no_bundle("there is no such folder"));
    }
    match folder.is_empty() {
        Ok(false) => Ok(folder),
        Ok(true) => Err(no_bundle("there is no kernel in it")),
        Err(why) => Err(no_bundle(&why.to_string())),
    }
}

/// Assembles kernels into `path`, a folder that is empty or not there yet; `workers` of them side by side, and `done` is called
/// from any thread as each is there. Returns the bytes of machine code.
///
/// Equal kernels, as those with equal text for a target, are one entry.
///
/// # Errors
/// When the folder cannot be made, is not empty or cannot be written to; when a kernel is refused.
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
        return Err(Error::Path { path: path.to_owned(), why });
    }
    let mut keys = BTreeSet::new();
    let different: Vec<&Source> = sources.iter().filter(|source| keys.insert(source.key())).collect();
    let one = |source: &&Source| {
        let code = made(source, assembler)?;
        folder.write(source.key(), &code).map_err(failed)?;
        done(source);
        Ok(code.cubin.len() as u64)
    };
    side_by_side::each(&different, workers, one).into_iter().sum()
}
