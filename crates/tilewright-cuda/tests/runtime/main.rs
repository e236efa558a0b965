//! The runtime on the GPU of this machine: streams, memory, kernels, graphs, and rejected calls. Without a GPU the tests are
//! skipped, except for the errors of that case.

mod graphs;
mod kernels;
mod lost;
mod memory;
mod refused;
mod streams;
mod written;

use std::process::Command;
use tilewright_cuda::{Buffer, Context, ErrorKind, Function, Result, Stream};
use tilewright_ptx::Arg;

/// A stream of the first GPU; without one, prints the reason.
fn stream() -> Option<Stream> {
    Stream::open(0).inspect_err(|why| println!("skipped: {why}")).ok()
}

/// Runs an ignored test of this program in a child process. Does nothing without a GPU.
fn run_in_child_process(test: &str) {
    if stream().is_none() {
        return;
    }
    let this = std::env::current_exe().expect("this program");
    let child = Command::new(this).args(["--ignored", "--exact", "--nocapture", test]).output();
    let output = child.expect("the child");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{test} failed");
}

/// Adds `value` to each of `numbers` with the kernel of [`written::add`].
fn add(stream: &Stream, function: &Function, numbers: &Buffer<u32>, value: u32) -> Result<()> {
    let args = [Arg::U64(numbers.address()), Arg::U32(numbers.len() as u32), Arg::U32(value)];
    stream.launch(function, [(numbers.len() as u32).div_ceil(written::THREADS), 1, 1], &args)
}

/// Keeps a stream busy for the given number of milliseconds.
fn spin(stream: &Stream, milliseconds: u64) -> Result<()> {
    let function = stream.load(&written::spin())?;
    stream.launch(&function, [1, 1, 1], &[Arg::U64(milliseconds * 1_000_000)])?;
    // unloading it would wait for the kernel
    std::mem::forget(function);
    Ok(())
}

#[test]
fn missing_drivers_and_gpus_are_errors() {
    match Context::open(0) {
        Ok(context) => {
            assert!(
                context.properties().arch >= 80 && context.properties().driver >= 12_000,
                "{:?}",
                context.properties()
            );
            assert!(
                context.properties().shared_per_cta >= 99 << 10 && context.properties().multiprocessors > 0
            );
            let (free, total) = context.free_memory().expect("numbers");
            assert!(free <= total && total <= context.properties().memory);
        }
        Err(error) if error.kind() == ErrorKind::NoDriver => {
            let expected =
                "context.open: there is no NVIDIA driver (libcuda.so or nvcuda.dll) on this machine";
            assert_eq!(error.to_string(), expected);
        }
        Err(error) => assert_ne!(error.kind(), ErrorKind::Argument, "{error}"),
    }
    for _ in 0..2 {
        let error = Context::open(10_000).expect_err("no such GPU");
        let there = Context::open(0).is_ok();
        assert_eq!(error.kind() == ErrorKind::NoGpu && error.to_string().contains("is not in 0.."), there);
    }
}
