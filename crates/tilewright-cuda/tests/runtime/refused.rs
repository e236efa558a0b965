//! Rejected calls: each with its reason, and the next call succeeds.

use crate::{add, stream, written};
use tilewright_cuda::{DriverError, ErrorKind, Result, Stream, assemble, load};
use tilewright_ptx::{Arg, Swizzle, TensorMap};

/// Asserts the kind of the error, and that it contains all these texts.
fn judge<T: std::fmt::Debug>(outcome: Result<T>, kind: ErrorKind, expected: &[&str]) -> DriverError {
    let error = outcome.expect_err("it should be refused");
    println!("{error}\n");
    assert_eq!(error.kind(), kind, "{error}");
    for text in expected {
        assert!(error.to_string().contains(text), "{error}\ndoes not say {text:?}");
    }
    error
}

/// Asserts that the stream is still usable.
fn works(stream: &Stream) -> Result<()> {
    let function = stream.load(&written::add())?;
    let numbers = stream.upload(&[1_u32; 300])?;
    add(stream, &function, &numbers, 1)?;
    assert_eq!(numbers.download()?, [2; 300]);
    Ok(())
}

#[test]
fn invalid_ptx_is_rejected_with_the_whole_log() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let ptx = stream.context().ptx(&written::add())?;
    let many = ptx.replace("ret;", "no.such.instruction %r1;\nnor.this.one %r2;\nret;");
    let context = stream.context();
    let error =
        judge(assemble(context, "add", &many), ErrorKind::Kernel, &["kernel add", "CUDA_ERROR_", "line"]);
    assert!(error.to_string().lines().count() > 2, "{error}");
    judge(load(context, "add", many.as_bytes()), ErrorKind::Kernel, &["kernel add", "CUDA_ERROR_", "line"]);
    judge(assemble(context, "none", "no PTX at all"), ErrorKind::Kernel, &["kernel none"]);
    judge(assemble(context, "none", "a\0b"), ErrorKind::Kernel, &["has a byte 0"]);
    works(&stream)
}

#[test]
fn damaged_or_foreign_machine_code_is_refused() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let (context, kernel) = (stream.context(), written::add());
    let cubin = assemble(context, "add", &context.ptx(&kernel)?)?;
    for len in [5, 64, cubin.len() / 2, cubin.len() - 1] {
        judge(load(context, "add", &cubin[..len]), ErrorKind::Kernel, &["is damaged"]);
    }
    judge(load(context, "other", &cubin), ErrorKind::Kernel, &["kernel other", "CUDA_ERROR_NOT_FOUND"]);
    judge(load(context, "add", &[0; 100]), ErrorKind::Kernel, &["neither machine code nor PTX"]);
    let function = load(context, "add", &cubin)?;
    judge(
        function.of_kernel(&written::spin()),
        ErrorKind::Kernel,
        &["kernel spin: its machine code is of kernel add"],
    );
    judge(stream.launch(&function, [1; 3], &[]), ErrorKind::Argument, &["Function::of_kernel"]);
    let mut foreign = written::sum_of(3);
    foreign.name = "add".into();
    match function.of_kernel(&foreign) {
        Err(error) => assert!(error.to_string().contains("parameters, its machine code"), "{error}"),
        Ok(_) => assert!(context.properties().driver < 12_040, "drivers tell since CUDA 12.4"),
    }
    works(&stream)
}

#[test]
fn invalid_launches_are_rejected() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.filled::<u32>(10, 0)?;
    let good = [Arg::U64(numbers.address()), Arg::U32(10), Arg::U32(1)];
    let refused = |grid, args: &[Arg], expected: &str| {
        let expected = ["launch of kernel add: ", expected];
        judge(stream.launch(&function, grid, args), ErrorKind::Argument, &expected);
    };
    refused([1, 1, 1], &good[..2], "2 arguments came, it has 3 parameters");
    refused([1, 1, 1], &[&good[..], &good[..1]].concat(), "4 arguments came");
    refused(
        [1, 1, 1],
        &[Arg::U32(0), Arg::U32(10), Arg::U32(1)],
        "parameter numbers is Value(B64), but U32(0) came",
    );
    refused([0, 1, 1], &good, "a grid of 0 x 1 x 1 CTAs");
    refused([1, 65_536, 1], &good, "a grid of 1 x 65536 x 1 CTAs");
    refused([1, 1, u32::MAX], &good, "CTAs");
    if stream.context().properties().arch >= 90 {
        let clusters = stream.load(&written::add_in_clusters())?;
        let expected = &["a grid of 3 CTAs in x cannot be cut into clusters of 2"];
        judge(stream.launch(&clusters, [3, 1, 1], &good), ErrorKind::Argument, expected);
        let with_map = stream.load(&written::with_map())?;
        let map = |address| {
            let (dims, strides, box_dims) = (vec![64, 64], vec![128], vec![64, 8]);
            let swizzle = Swizzle::None;
            Arg::TensorMap(TensorMap { element_bytes: 2, address, dims, strides, box_dims, swizzle }.into())
        };
        let expected = &["launch of kernel with_map: parameter map: ", "is not a multiple of 16"];
        judge(stream.launch(&with_map, [1; 3], &[map(numbers.address() + 2)]), ErrorKind::Argument, expected);
        stream.launch(&with_map, [1; 3], &[map(numbers.address())])?;
    }
    assert_eq!(numbers.download()?, [0; 10]);
    works(&stream)
}

#[test]
fn too_much_shared_memory_is_rejected() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let most = stream.context().properties().shared_per_cta;
    let kernel = written::reverse(most / 4 + 1);
    let expected =
        [format!("a CTA of it has {} bytes of shared memory", most / 4 * 4 + 4), format!("gives {most}")];
    let outcome = load(stream.context(), "reverse", stream.context().ptx(&kernel)?.as_bytes());
    match outcome {
        Ok(function) => judge(function.of_kernel(&kernel), ErrorKind::Kernel, &[&expected[0], &expected[1]]),
        Err(error) => judge::<()>(Err(error), ErrorKind::Kernel, &["kernel reverse"]),
    };
    works(&stream)
}
