//! Context loss: the error says so, and every later call returns an error instead of crashing. Runs in a child process, because
//! the context is unusable afterwards.

use crate::{run_in_child_process, stream, written};
use tilewright_cuda::{ErrorKind, Result};
use tilewright_ptx::Arg;

#[test]
fn an_illegal_address_loses_the_context() {
    run_in_child_process("lost::child_that_writes_to_an_illegal_address");
}

#[test]
#[ignore = "run in a child process by the test above"]
fn child_that_writes_to_an_illegal_address() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.filled::<u32>(10, 0)?;
    stream.launch(&function, [1, 1, 1], &[Arg::U64(0x100), Arg::U32(10), Arg::U32(1)])?;
    let error = stream.synchronize().expect_err("an illegal address");
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::ContextLost);
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert!(error.to_string().contains("the context is lost"), "{error}");
    for outcome in [
        stream.allocate(100).map(drop),
        stream.write(numbers.address(), &[1; 4]),
        numbers.download().map(drop),
        stream.launch(&function, [1, 1, 1], &[Arg::U64(numbers.address()), Arg::U32(10), Arg::U32(1)]),
        stream.context().synchronize(),
    ] {
        assert_eq!(outcome.expect_err("the context is lost").kind(), ErrorKind::ContextLost);
    }
    Ok(())
}
