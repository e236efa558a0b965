//! Golden PTX: the text of some kernels in `crates/tilewright-kernels/golden/`, written by `--bless`.
//!
//! A test of the kernels crate compares the files; this module only writes them.

use std::path::Path;
use tilewright_kernels::golden_texts;

/// The folder, from the root.
const FOLDER: &str = "crates/tilewright-kernels/golden";

/// Writes the texts and removes all other files. Returns the number of changed files.
pub(crate) fn bless(root: &Path) -> Result<usize, String> {
    let folder = root.join(FOLDER);
    let texts = golden_texts().map_err(|why| why.to_string())?;
    let failed = |why: std::io::Error| format!("{FOLDER}: {why}");
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let mut changed = 0;
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !texts.iter().any(|(file, _)| path.file_name().is_some_and(|name| name == file.as_str())) {
            std::fs::remove_file(path).map_err(failed)?;
            changed += 1;
        }
    }
    for (file, text) in texts {
        let path = folder.join(file);
        if std::fs::read_to_string(&path).is_ok_and(|old| old == text) {
            continue;
        }
        std::fs::write(path, text).map_err(failed)?;
        changed += 1;
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::{FOLDER, bless};

    #[test]
    fn blessing_writes_missing_files_and_removes_stale_ones() {
        let root = tempfile::tempdir().unwrap();
        let texts = tilewright_kernels::golden_texts().unwrap();
        assert_eq!(bless(root.path()).unwrap(), texts.len());
        assert_eq!(bless(root.path()).unwrap(), 0);
        let folder = root.path().join(FOLDER);
        std::fs::write(folder.join("gone.ptx"), "").unwrap();
        std::fs::write(folder.join(&texts[0].0), "old").unwrap();
        assert_eq!(bless(root.path()).unwrap(), 2);
        assert!(!folder.join("gone.ptx").exists());
        assert_eq!(std::fs::read_to_string(folder.join(&texts[0].0)).unwrap(), texts[0].1);
    }
}
