//! Damaged and foreign entries, and unusable folders: results stay correct.

use crate::{Fake, files, keep_warning, kernel, machine_code, open, quiet, warnings_about};
use std::{fs, path::Path};
use tilewright_cuda::cache::{Cache, Settings};

/// Damages the file of an entry, then asserts that the kernel is correct and that the entry is repaired.
#[track_caller]
fn recovers(damage: impl Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    open(folder.path()).code(&kernel(1), &fake).unwrap();
    let entry = folder.path().join(&files(folder.path())[0]);
    damage(&entry);
    let cache = open(folder.path());
    assert_eq!(cache.code(&kernel(1), &fake).unwrap().cubin, machine_code("fake 1", &kernel(1)));
    assert_eq!((cache.counts().assembled, cache.counts().invalid), (1, 1));
    let next = open(folder.path());
    assert_eq!(next.code(&kernel(1), &fake).unwrap().cubin, machine_code("fake 1", &kernel(1)));
    assert_eq!((next.counts().cached, next.counts().invalid), (1, 0), "the next start is clean");
}

#[test]
fn a_file_cut_anywhere_is_a_miss() {
    for len in [0, 1, 11, 12, 43, 44, 76, 90, 100_000, 200_000] {
        recovers(|entry| fs::OpenOptions::new().write(true).open(entry).unwrap().set_len(len).unwrap());
    }
}

#[test]
fn an_altered_file_is_a_miss() {
    for at in [0, 8, 12, 44, 76, 80, 150, 100_000, 200_000] {
        recovers(|entry| {
            let mut bytes = fs::read(entry).unwrap();
            bytes[at] ^= 0x10;
            fs::write(entry, bytes).unwrap();
        });
    }
    recovers(|entry| {
        use std::io::Write;
        fs::OpenOptions::new().append(true).open(entry).unwrap().write_all(b"more").unwrap();
    });
}

#[test]
fn a_file_of_something_else_is_a_miss() {
    recovers(|entry| fs::write(entry, "\x7fELF and whatever").unwrap());
    recovers(|entry| {
        // another kernel's valid entry under this kernel's name
        let elsewhere = tempfile::tempdir().unwrap();
        open(elsewhere.path()).code(&kernel(2), &Fake::new("fake 1")).unwrap();
        fs::copy(elsewhere.path().join(&files(elsewhere.path())[0]), entry).unwrap();
    });
    #[cfg(unix)]
    recovers(|entry| {
        // a pipe, from which a read would block
        fs::remove_file(entry).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(entry).status().unwrap().success());
    });
}

#[test]
fn foreign_files_are_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["README", "abc.kernel", "draft-1", "x.kernel.bak"];
    names.iter().for_each(|name| fs::write(folder.path().join(name), "mine").unwrap());
    fs::create_dir(folder.path().join("d".repeat(64) + ".kernel")).unwrap();
    let cache = Cache::open(quiet(folder.path()).limit(0)).unwrap();
    cache.code(&kernel(1), &Fake::new("fake 1")).unwrap();
    assert_eq!((cache.list().unwrap().len(), cache.clear().unwrap().0), (0, 0));
    assert_eq!(files(folder.path()).len(), names.len() + 1);
}

#[test]
fn an_unwritable_folder_warns_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a-file");
    fs::write(&file, "").unwrap();
    // a folder below a file, and an entry whose name is taken by a folder
    let below = file.join("kernels");
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let fake = Fake::new("fake 1");
    open(&taken).code(&kernel(1), &fake).unwrap();
    let entry = taken.join(&files(&taken)[0]);
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    for path in [below, taken] {
        let cache = Cache::open(Settings::in_folder(&path).warn(keep_warning)).unwrap();
        for number in [1, 2, 1, 3] {
            let code = cache.code(&kernel(number), &fake).unwrap();
            assert_eq!(code.cubin, machine_code("fake 1", &kernel(number)));
        }
        assert_eq!(cache.counts().assembled, 3, "each once in a process");
        assert_eq!(warnings_about(&format!("kernel cache: {}: ", path.display())), 1);
    }
}
