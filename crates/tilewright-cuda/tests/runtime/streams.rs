//! Streams and events: order, synchronization, timing, and calls that must not block.

use crate::{add, run_in_child_process, spin, stream, written};
use std::time::Instant;
use tilewright_cuda::{Context, Result};

#[test]
fn a_thousand_launches_are_done_in_order() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.upload(&vec![7_u32; 1000])?;
    add(&stream, &function, &numbers, 0)?;
    stream.synchronize()?;
    let start = Instant::now();
    (0..1000).try_for_each(|_| add(&stream, &function, &numbers, 3))?;
    let submitted = start.elapsed();
    assert_eq!(numbers.download()?, vec![3007; 1000]);
    println!("{:.2} us of the host for a launch", submitted.as_secs_f64() * 1e3);
    Ok(())
}

/// In a child process, because frees of other tests synchronize the context and block all threads.
#[test]
fn launches_writes_and_fills_do_not_block() {
    run_in_child_process("streams::child_that_does_not_block");
}

#[test]
#[ignore = "run in a child process by the test above"]
fn child_that_does_not_block() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.filled::<u32>(16_384, 0)?;
    stream.write(numbers.address(), &[0; 64])?;
    stream.load(&written::spin())?;
    let (before, after) = (stream.context().event()?, stream.context().event()?);
    stream.synchronize()?;
    spin(&stream, 1000)?;
    stream.record(&before)?;
    let mut bytes = vec![1_u8; 65_536];
    stream.write(numbers.address(), &bytes)?;
    // reused while the copy is still pending
    bytes.fill(9);
    add(&stream, &function, &numbers, 1)?;
    stream.fill(numbers.address(), 7, 4)?;
    drop(stream.allocate(1 << 20)?);
    stream.record(&after)?;
    assert!(!before.is_done()? && !after.is_done()? && !stream.is_done()?, "a call has blocked");
    after.synchronize()?;
    assert!(before.is_done()? && after.is_done()? && stream.is_done()?);
    let mut expected = vec![0x0101_0102; 16_384];
    expected[0] = 0x0707_0707;
    assert!(numbers.download()? == expected);
    Ok(())
}

#[test]
fn one_stream_waits_for_another() -> Result<()> {
    let Some(first) = stream() else { return Ok(()) };
    let second = first.context().stream()?;
    let function = first.load(&written::add())?;
    let numbers = first.filled::<u32>(100, 0)?;
    let event = first.context().event()?;
    spin(&first, 50)?;
    add(&first, &function, &numbers, 1)?;
    first.record(&event)?;
    second.wait(&event)?;
    add(&second, &function, &numbers, 10)?;
    let mut bytes = [0; 4];
    second.read(numbers.address(), &mut bytes)?;
    assert_eq!(u32::from_le_bytes(bytes), 11);
    assert!(first.is_done()?);
    Ok(())
}

#[test]
fn events_and_stopwatches_measure_time() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let seconds = stream.stopwatch()?.time(|| spin(&stream, 20))?;
    assert!((0.02..2.0).contains(&seconds), "{seconds}");
    let (start, stop) = (stream.context().timing_event()?, stream.context().timing_event()?);
    stream.record(&start)?;
    spin(&stream, 10)?;
    stream.record(&stop)?;
    stop.synchronize()?;
    let seconds = stop.seconds_since(&start)?;
    assert!((0.01..2.0).contains(&seconds), "{seconds}");
    let without = stream.context().event()?;
    let error = without.seconds_since(&start).expect_err("it has no time");
    assert!(error.to_string().contains("both events have to remember times"), "{error}");
    Ok(())
}

#[test]
fn the_callers_streams_are_borrowed() -> Result<()> {
    let Some(own) = stream() else { return Ok(()) };
    let function = own.load(&written::add())?;
    // a stream of another library, and the default stream
    for handle in [own.handle(), 0] {
        let borrowed = own.context().borrow_stream(handle)?;
        assert_eq!(borrowed.handle(), handle);
        let numbers = borrowed.upload(&[1_u32, 2, 3])?;
        add(&borrowed, &function, &numbers, 4)?;
        assert_eq!(numbers.download()?, [5, 6, 7]);
    }
    // dropping a borrowed stream does not destroy it
    own.synchronize()
}

#[test]
fn threads_work_at_the_same_time() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let context = stream.context();
    let function = context.load(&written::add())?;
    let one = |thread: u32| -> Result<()> {
        let stream = Context::open(0)?.stream()?;
        let numbers = stream.filled::<u32>(5000, 0)?;
        for round in 0..50 {
            stream.write(numbers.address(), &vec![(thread + round) as u8; 20_000])?;
            add(&stream, &function, &numbers, round)?;
            // captures of different threads are independent
            let graph = stream.capture(|| add(&stream, &function, &numbers, 1))?;
            graph.instantiate()?.launch(&stream)?;
            let expected = u32::from_le_bytes([(thread + round) as u8; 4]) + round + 1;
            assert_eq!(numbers.download()?, vec![expected; 5000], "thread {thread}, round {round}");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || one(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })
}
