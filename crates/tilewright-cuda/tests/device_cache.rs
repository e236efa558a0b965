//! The kernel cache with a driver: kernels from every source run. Skipped without a GPU.

use tilewright_cuda::{
    Buffer, Stream,
    cache::{Cache, Counts, Driver, Settings, Source},
};
use tilewright_ptx::{Arg, Builder, Invalid, Kernel};

/// Adds `amount` to 64 numbers.
fn adds(name: &str, amount: u32) -> Result<Kernel, Invalid> {
    Builder::kernel(name, 64, |k| {
        let place = k.global::<u32>("numbers").at(k.thread());
        place.store(place.load() + amount);
    })
}

fn stream() -> Option<Stream> {
    Stream::open(0).map_err(|why| println!("skipped: {why}")).ok()
}

#[track_caller]
fn runs(cache: &Cache, stream: &Stream, kernel: &Kernel, amount: u32) {
    let function = cache.function(&Driver::of(stream.context()), kernel).unwrap();
    let numbers: Buffer<u32> = stream.upload(&[5; 64]).unwrap();
    stream.launch(&function, [1, 1, 1], &[Arg::U64(numbers.address())]).unwrap();
    assert_eq!(numbers.download().unwrap(), [5 + amount; 64]);
}

#[test]
fn assembled_and_cached_kernels_run() {
    let kernel = adds("adds_seven", 7).unwrap();
    let Some(stream) = stream() else { return };
    let folder = tempfile::tempdir().unwrap();
    for run in 0..2 {
        let cache = Cache::open(Settings::in_folder(folder.path())).unwrap();
        runs(&cache, &stream, &kernel, 7);
        runs(&cache, &stream, &kernel, 7); // already loaded
        let (assembled, cached) = if run == 0 { (1, 0) } else { (0, 1) };
        assert_eq!(cache.counts(), Counts { assembled, cached, ..Counts::default() });
    }
}

#[test]
fn machine_code_that_the_driver_rejects_is_assembled_again() {
    let kernel = adds("adds_nine", 9).unwrap();
    let Some(stream) = stream() else { return };
    let folder = tempfile::tempdir().unwrap();
    // a valid entry with invalid machine code
    struct Wrong(Driver);
    impl tilewright_cuda::cache::Assembler for Wrong {
        fn identity(&self) -> &str {
            self.0.identity()
        }
        fn assemble(&self, _: &Source) -> Result<Vec<u8>, String> {
            Ok(b"\x7fELF\x02\x01, and not one byte of code".to_vec())
        }
    }
    let source = Source::of(&kernel, stream.context().properties().arch).unwrap();
    let wrong = Wrong(Driver::of(stream.context()));
    Cache::open(Settings::in_folder(folder.path())).unwrap().code(&source, &wrong).unwrap();
    let cache = Cache::open(Settings::in_folder(folder.path())).unwrap();
    runs(&cache, &stream, &kernel, 9);
    assert_eq!(cache.counts(), Counts { assembled: 1, cached: 1, invalid: 1, ..Counts::default() });
    let next = Cache::open(Settings::in_folder(folder.path())).unwrap();
    runs(&next, &stream, &kernel, 9);
    assert_eq!(next.counts(), Counts { cached: 1, ..Counts::default() });
}

#[test]
fn a_warm_start_is_short() {
    let Some(stream) = stream() else { return };
    let folder = tempfile::tempdir().unwrap();
    let driver = Driver::of(stream.context());
    let kernels: Vec<Kernel> = (0..16).map(|n| adds(&format!("adds_{n}"), n).unwrap()).collect();
    let mut seconds = [0.0; 2];
    for run in &mut seconds {
        let cache = Cache::open(Settings::in_folder(folder.path())).unwrap();
        let start = std::time::Instant::now();
        kernels.iter().for_each(|kernel| drop(cache.function(&driver, kernel).unwrap()));
        *run = start.elapsed().as_secs_f64();
    }
    let [cold, warm] = seconds;
    println!("16 kernels: {:.1} ms cold, {:.1} ms warm", cold * 1e3, warm * 1e3);
    assert!(warm < 0.16, "loading takes less than 10 ms per kernel");
}
