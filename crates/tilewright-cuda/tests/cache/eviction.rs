//! Eviction by the size limit, in order of last use.

use crate::{Fake, files, kernel, machine_code, open, quiet};
use std::{
    fs::{self, File},
    path::Path,
    time::{Duration, SystemTime},
};
use tilewright_cuda::cache::Cache;

const DAY: u64 = 24 * 3600;

fn age(file: &Path, seconds: u64) {
    let at = SystemTime::now() - Duration::from_secs(seconds);
    File::options().write(true).open(file).unwrap().set_modified(at).unwrap();
}

/// The kernels in the cache.
fn kept(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        open(folder).list().unwrap().into_iter().map(|entry| entry.code.unwrap().kernel).collect();
    names.sort();
    names
}

#[test]
fn the_least_recently_used_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    for number in 1..=3 {
        open(folder.path()).code(&kernel(number), &fake).unwrap();
        for name in files(folder.path()) {
            let path = folder.path().join(name);
            let old = path.metadata().unwrap().modified().unwrap().elapsed().unwrap().as_secs();
            age(&path, old + DAY);
        }
    }
    // kernel 1 is the oldest but used now; a use in read-only mode does not count
    open(folder.path()).code(&kernel(1), &fake).unwrap();
    Cache::open(quiet(folder.path()).read_only()).unwrap().code(&kernel(2), &fake).unwrap();
    let cache = Cache::open(quiet(folder.path()).limit(700_000)).unwrap();
    cache.code(&kernel(4), &fake).unwrap();
    assert_eq!(kept(folder.path()), ["kernel_1", "kernel_3", "kernel_4"]);
    assert_eq!(cache.code(&kernel(2), &fake).unwrap().cubin, machine_code("fake 1", &kernel(2)));
    assert_eq!(kept(folder.path()), ["kernel_1", "kernel_2", "kernel_4"]);
}

#[test]
fn a_kernel_larger_than_the_limit_is_right_and_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(quiet(folder.path()).limit(1000)).unwrap();
    let code = cache.code(&kernel(1), &Fake::new("fake 1")).unwrap();
    assert_eq!(code.cubin, machine_code("fake 1", &kernel(1)));
    assert_eq!(files(folder.path()).len(), 0);
}

#[test]
fn old_drafts_of_killed_processes_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let [young, old] = [".draft-young", ".draft-old"].map(|name| folder.path().join(name));
    for draft in [&young, &old] {
        fs::write(draft, "half an entry").unwrap();
    }
    age(&old, 3600);
    open(folder.path()).code(&kernel(1), &Fake::new("fake 1")).unwrap();
    assert!(young.exists(), "another process may be writing it");
    assert!(!old.exists());
}
