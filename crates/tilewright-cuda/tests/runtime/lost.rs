//! An error of the device that loses the context says so, and every call behind it is an error too, not a crash. In a process of
//! its own, since nothing more can be done in that one.

use crate::{in_a_process_of_its_own, stream, written};
use tilewright_cuda::{ErrorKind, Result};
use tilewright_ptx::sim::Arg;

#[test]
fn an_illegal_address_says_that_the_context_is_lost() {
    in_a_process_of_its_own("lost::child_that_writes_where_nothing_is");
}

#[test]
#[ignore = "it is run by the test above, in a process of its own"]
fn child_that_writes_where_nothing_is() -> Result<()> {
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
