//! Many threads of one process.

use crate::{Fake, kernel, machine_code, open};
use std::{sync::Barrier, time::Duration};
use tilewright_cuda::cache::{Cache, Settings, Source};

#[test]
fn sixteen_threads_that_ask_at_once_have_it_assembled_once() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::that_takes(Duration::from_millis(30));
    for cache in [open(folder.path()), Cache::open(Settings::off()).unwrap()] {
        let before = fake.calls();
        let start = Barrier::new(16);
        std::thread::scope(|scope| {
            for thread in 0..16 {
                let (cache, fake, start) = (&cache, &fake, &start);
                scope.spawn(move || {
                    start.wait();
                    let source = kernel(thread % 2);
                    assert_eq!(cache.code(&source, fake).unwrap().cubin, machine_code("fake 1", &source));
                });
            }
        });
        assert_eq!(fake.calls() - before, 2);
    }
}

#[test]
fn all_who_wait_for_a_failure_are_told_of_it() {
    let cache = Cache::open(Settings::off()).unwrap();
    let fake = Fake::that_takes(Duration::from_millis(200));
    let start = Barrier::new(8);
    let source = Source::new("wrong", "sm_90a", "mistake");
    let ask = || {
        start.wait();
        cache.code(&source, &fake).unwrap_err().to_string()
    };
    let told = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(told.iter().all(|why| why == &told[0]), "{told:?}");
    assert_eq!(fake.calls(), 1);
}

#[test]
fn a_thread_that_panics_leaves_nothing_behind() {
    struct Panics;
    impl tilewright_cuda::cache::Assembler for Panics {
        fn identity(&self) -> &str {
            "fake 1"
        }
        fn assemble(&self, _: &Source) -> Result<Vec<u8>, String> {
            panic!("as the test wants it")
        }
    }
    let cache = Cache::open(Settings::off()).unwrap();
    let ask = || cache.code(&kernel(1), &Panics);
    assert!(std::thread::scope(|scope| scope.spawn(ask).join()).is_err());
    assert_eq!(cache.code(&kernel(1), &Fake::new("fake 1")).unwrap().cubin.len(), 200_000);
}

#[test]
fn different_kernels_are_assembled_side_by_side() {
    let cache = Cache::open(Settings::off().workers(4)).unwrap();
    let together = Barrier::new(4);
    struct Meets<'a>(&'a Barrier);
    impl tilewright_cuda::cache::Assembler for Meets<'_> {
        fn identity(&self) -> &str {
            "meets"
        }
        fn assemble(&self, source: &Source) -> Result<Vec<u8>, String> {
            self.0.wait(); // ends only if four are here
            Ok(source.name().into())
        }
    }
    let sources: Vec<Source> = (0..8).map(kernel).collect();
    let done = std::sync::atomic::AtomicUsize::new(0);
    let count = |_: &Source| {
        done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    };
    let codes = cache.all(&sources, &Meets(&together), &count).unwrap();
    assert!(codes.iter().zip(&sources).all(|(code, source)| code.cubin == source.name().as_bytes()));
    assert_eq!(done.into_inner(), 8);
}
