//! A copy of the working tree in which faults are planted, so that nobody's files are touched.
//!
//! Files that are equal already are left alone, with their times: what was built of them stays built.

use super::fault::Fault;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The copy.
pub(super) struct Scratch {
    pub(super) root: PathBuf,
}

impl Scratch {
    /// Makes `to` equal to what git knows, or would add, of the working tree `from`.
    pub(super) fn copy(from: &Path, to: &Path) -> Result<Self, String> {
        let mut files = listed(from)?;
        files.retain(|path| from.join(path).is_file()); // git lists what was deleted but not committed
        for path in &files {
            let (source, target) = (from.join(path), to.join(path));
            let bytes =
                fs::read(&source).map_err(|why| format!("cannot read {}: {why}", source.display()))?;
            if fs::read(&target).is_ok_and(|known| known == bytes) {
                continue;
            }
            let made = target.parent().map_or(Ok(()), fs::create_dir_all);
            // copied, not written: a script stays executable
            made.and_then(|()| fs::copy(&source, &target))
                .map_err(|why| format!("cannot write {}: {why}", target.display()))?;
        }
        remove_others(to, Path::new(""), &files)
            .map_err(|why| format!("cannot clear {}: {why}", to.display()))?;
        Ok(Self { root: to.to_owned() })
    }

    /// Does `work` with `fault` in the tree; the file is as before when it returns.
    ///
    /// # Errors
    /// When the fault's text does not occur exactly once, or its file cannot be read or written.
    pub(super) fn with_fault<T>(&self, fault: &Fault, work: impl FnOnce() -> T) -> Result<T, String> {
        let path = self.root.join(&fault.file);
        let source = fs::read_to_string(&path).map_err(|why| format!("cannot read {}: {why}", fault.file))?;
        let write =
            |text: &str| fs::write(&path, text).map_err(|why| format!("cannot write {}: {why}", fault.file));
        write(&fault.plant(&source)?)?;
        let result = work();
        write(&source)?;
        Ok(result)
    }
}

/// Tracked files, and untracked ones that are not ignored.
fn listed(root: &Path) -> Result<BTreeSet<PathBuf>, String> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(|why| format!("`git ls-files` does not start: {why}"))?;
    if !output.status.success() {
        return Err(format!("`git ls-files`: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let paths = String::from_utf8(output.stdout).map_err(|_| "a path is not UTF-8".to_owned())?;
    Ok(paths.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from).collect())
}

/// Removes the files below `root/folder` that are not among `files`.
fn remove_others(root: &Path, folder: &Path, files: &BTreeSet<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            remove_others(root, &path, files)?;
        } else if !files.contains(&path) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Fault, Scratch};
    use std::{fs, path::Path, process::Command};

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn repository() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), ".gitignore", "/target\n");
        write(root.path(), "src/sum.rs", "a + b");
        write(root.path(), "target/debug/sum", "built");
        let made = Command::new("git").args(["init", "--quiet"]).current_dir(root.path()).status();
        assert!(made.unwrap().success());
        root
    }

    fn fault(replace: &str) -> Fault {
        let [about, with, package, target, test] = ["", "a - b", "p", "t", "sums"].map(str::to_owned);
        Fault {
            about,
            file: "src/sum.rs".to_owned(),
            replace: replace.to_owned(),
            with,
            package,
            target,
            test,
        }
    }

    #[test]
    fn the_copy_has_what_people_wrote_and_loses_what_they_deleted() {
        let (from, to) = (repository(), tempfile::tempdir().unwrap());
        write(to.path(), "src/gone.rs", "");
        write(to.path(), "src/sum.rs", "a - b"); // a run that was broken off
        Scratch::copy(from.path(), to.path()).unwrap();
        assert_eq!(fs::read_to_string(to.path().join("src/sum.rs")).unwrap(), "a + b");
        assert!(!to.path().join("src/gone.rs").exists() && !to.path().join("target").exists());
    }

    #[test]
    fn an_equal_file_keeps_its_time() {
        let (from, to) = (repository(), tempfile::tempdir().unwrap());
        let time = || fs::metadata(to.path().join("src/sum.rs")).unwrap().modified().unwrap();
        Scratch::copy(from.path(), to.path()).unwrap();
        let before = time();
        Scratch::copy(from.path(), to.path()).unwrap();
        assert_eq!(time(), before);
    }

    #[test]
    fn a_fault_is_there_while_the_work_is_done_and_gone_after_it() {
        let (from, to) = (repository(), tempfile::tempdir().unwrap());
        let scratch = Scratch::copy(from.path(), to.path()).unwrap();
        let read = |root: &Path| fs::read_to_string(root.join("src/sum.rs")).unwrap();
        let during = scratch.with_fault(&fault("a + b"), || read(to.path())).unwrap();
        assert_eq!((during.as_str(), read(to.path()).as_str()), ("a - b", "a + b"));
        assert_eq!(read(from.path()), "a + b", "the user's tree is not touched");
    }

    #[test]
    fn a_fault_that_does_not_apply_leaves_the_file_alone() {
        let (from, to) = (repository(), tempfile::tempdir().unwrap());
        let scratch = Scratch::copy(from.path(), to.path()).unwrap();
        let why = scratch.with_fault(&fault("a * b"), || panic!("nothing is done")).unwrap_err();
        assert_eq!(why, "its text occurs 0 times in src/sum.rs, expected once");
        assert_eq!(fs::read_to_string(to.path().join("src/sum.rs")).unwrap(), "a + b");
    }
}
