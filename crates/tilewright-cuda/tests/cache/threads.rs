//! Concurrent threads of one process.

use crate::{Fake, kernel, machine_code, open};
use std::{sync::Barrier, time::Duration};
use tilewright_cuda::cache::{Cache, Settings, Source};

#[test]
fn sixteen_concurrent_requests_assemble_once() {
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
fn all_waiting_threads_get_the_error() {
    let cache = Cache::open(Settings::off()).unwrap();
    let fake = Fake::that_takes(Duration::from_millis(200));
    let start = Barrier::new(8);
    let source = Source::new("wrong", "sm_90a", "mistake");
    let request = || {
        start.wait();
        cache.code(&source, &fake).unwrap_err().to_string()
    };
    let errors = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(request)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(errors.iter().all(|why| why == &errors[0]), "{errors:?}");
    assert_eq!(fake.calls(), 1);
}

#[test]
fn a_panic_does_not_poison_the_cache() {
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
    let request = || cache.code(&kernel(1), &Panics);
    assert!(std::thread::scope(|scope| scope.spawn(request).join()).is_err());
    assert_eq!(cache.code(&kernel(1), &Fake::new("fake 1")).unwrap().cubin.len(), 200_000);
}

#[test]
fn different_kernels_are_assembled_in_parallel() {
    let cache = Cache::open(Settings::off().workers(4)).unwrap();
    let together = Barrier::new(4);
    struct WaitsForFour<'a>(&'a Barrier);
    impl tilewright_cuda::cache::Assembler for WaitsForFour<'_> {
        fn identity(&self) -> &str {
            "waits"
        }
        fn assemble(&self, source: &Source) -> Result<Vec<u8>, String> {
            self.0.wait(); // returns only if four threads wait
            Ok(source.name().into())
        }
    }
    let sources: Vec<Source> = (0..8).map(kernel).collect();
    let done = std::sync::atomic::AtomicUsize::new(0);
    let count = |_: &Source| {
        done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    };
    let codes = cache.all(&sources, &WaitsForFour(&together), &count).unwrap();
    assert!(codes.iter().zip(&sources).all(|(code, source)| code.cubin == source.name().as_bytes()));
    assert_eq!(done.into_inner(), 8);
}
