//! The files of the project, read once. Guards read only this tree, so a test can substitute any other.

use std::{collections::BTreeMap, path::Path};

/// Larger files are data, neither prose nor code.
const MAX_TEXT: u64 = 1 << 20;

/// Paths relative to the root, separated by `/`, with the content of text files.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    files: BTreeMap<String, Option<String>>,
}

impl Tree {
    /// Reads the project at `root`, except paths in `.gitignore`, version control and tool folders.
    pub(crate) fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        let ignored = std::fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
        let ignored: Vec<&str> = ignored.lines().map(|line| line.trim().trim_matches('/')).collect();
        tree.read_folder(root, "", &ignored)
            .map_err(|why| format!("cannot read {}: {why}", root.display()))?;
        Ok(tree)
    }

    fn read_folder(&mut self, folder: &Path, prefix: &str, ignored: &[&str]) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type()?;
            let hidden =
                path.starts_with('.') && kind.is_dir() && ![".ci", ".cargo"].contains(&path.as_str());
            if hidden || path == ".git" || ignored.contains(&path.as_str()) {
                continue;
            }
            if kind.is_dir() {
                self.read_folder(&entry.path(), &format!("{path}/"), ignored)?;
            } else {
                let small = kind.is_file() && entry.metadata()?.len() <= MAX_TEXT;
                let text = if small { String::from_utf8(std::fs::read(entry.path())?).ok() } else { None };
                self.files.insert(path, text);
            }
        }
        Ok(())
    }

    /// A tree of these files, to test a guard.
    pub(crate) fn of<const N: usize>(files: [(&str, String); N]) -> Self {
        Self { files: files.map(|(path, text)| (path.to_owned(), Some(text))).into() }
    }

    /// Every path.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Path and text of the files with a suffix.
    pub(crate) fn texts(&self, ending: &str) -> impl Iterator<Item = (&str, &str)> {
        let texts = self.files.iter().filter_map(|(path, text)| Some((path.as_str(), text.as_deref()?)));
        texts.filter(move |(path, _)| path.ends_with(ending))
    }

    /// The text of one file.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path)?.as_deref()
    }

    /// Whether `path` is a file or a non-empty folder.
    pub(crate) fn has(&self, path: &str) -> bool {
        let folder = if path.ends_with('/') { path.to_owned() } else { format!("{path}/") };
        let below = self.files.range(folder.clone()..).next().is_some_and(|(at, _)| at.starts_with(&folder));
        path.is_empty() || self.files.contains_key(path) || below
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_TEXT, Tree};

    #[test]
    fn ignored_and_hidden_paths_are_skipped() {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in [
            (".gitignore", &b"/target\n/venv/\n"[..]),
            (".git/config", b"x"),
            (".tool/state.md", b"x"),
            (".ci/run", b"cargo"),
            ("target/debug/a.rs", b"x"),
            ("venv/b.py", b"x"),
            ("src/kv/target/page.rs", b"//! A page.\n"),
            ("weights.bin", b"\xff\xfe"),
            ("large.md", &vec![b'x'; MAX_TEXT as usize + 1]),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let tree = Tree::read(root.path()).unwrap();
        let paths: Vec<&str> = tree.paths().collect();
        assert_eq!(paths, [".ci/run", ".gitignore", "large.md", "src/kv/target/page.rs", "weights.bin"]);
        assert_eq!(tree.text("src/kv/target/page.rs"), Some("//! A page.\n"));
        assert_eq!((tree.text("weights.bin"), tree.text("large.md")), (None, None));
        for (path, there) in [("src/kv", true), ("src/kv/", true), ("src/k", false), ("weights.bin", true)] {
            assert_eq!(tree.has(path), there, "{path}");
        }
    }
}
