//! Graphs: replay on the current contents of memory, retained resources, and recovery from errors during a capture.

use crate::{add, stream, written};
use tilewright_cuda::{DriverError, ErrorKind, Result};

#[test]
fn a_graph_reads_the_current_contents_of_memory() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let (first, second) = (stream.filled::<u32>(1000, 0)?, stream.filled::<u32>(1000, 0)?);
    let graph = stream.capture(|| {
        add(&stream, &function, &first, 1)?;
        stream.copy(second.address(), first.address(), 4000)?;
        add(&stream, &function, &second, 100)?;
        assert!(stream.is_captured()? && !stream.is_done()?);
        Ok(())
    })?;
    assert_eq!(graph.num_nodes(), 3);
    assert!(!stream.is_captured()?);
    assert_eq!(first.download()?, [0; 1000], "recorded, not done");
    let graph = graph.instantiate()?;
    for begin in [5_u32, 50, 500] {
        stream.write(first.address(), &begin.to_le_bytes().repeat(1000))?;
        graph.launch(&stream)?;
        assert_eq!(first.download()?, vec![begin + 1; 1000]);
        assert_eq!(second.download()?, vec![begin + 101; 1000]);
    }
    // on another stream, after a synchronization
    let other = stream.context().stream()?;
    stream.synchronize()?;
    (0..1000).try_for_each(|_| graph.launch(&other))?;
    other.synchronize()?;
    assert_eq!(first.download()?, vec![1501; 1000]);
    Ok(())
}

#[test]
fn a_captured_write_keeps_its_bytes() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    for len in [4, 1000, 3_000_000] {
        let numbers = stream.filled::<u32>(len, 0)?;
        let mut bytes = 7_u32.to_le_bytes().repeat(len);
        let graph = stream.capture(|| {
            stream.write(numbers.address(), &bytes)?;
            bytes.fill(0xff);
            add(&stream, &function, &numbers, 1)
        })?;
        let graph = graph.instantiate()?;
        for _ in 0..3 {
            // the writes in between use other staging slots
            stream.write(numbers.address(), &bytes)?;
            graph.launch(&stream)?;
            assert!(numbers.download()? == vec![8; len], "{len} numbers");
        }
    }
    Ok(())
}

#[test]
fn a_graph_retains_its_resources() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let numbers = stream.filled::<u32>(1000, 0)?;
    let graph = {
        let temporary = stream.context().stream()?;
        let function = temporary.load(&written::add())?;
        temporary.capture(|| add(&temporary, &function, &numbers, 2))?.instantiate()?
    };
    // reuses the address space that freed modules would have left
    for _ in 0..20 {
        stream.load(&written::spin())?;
    }
    graph.launch(&stream)?;
    graph.launch(&stream)?;
    drop(graph);
    assert_eq!(numbers.download()?, [4; 1000]);
    Ok(())
}

#[test]
fn an_error_during_a_capture_leaves_the_stream_usable() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.filled::<u32>(100, 0)?;
    let mut byte = [0];
    let refused = |what: &str, outcome: Result<()>| {
        let error = outcome.expect_err(what);
        println!("{what}: {error}");
        assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
        assert!(error.to_string().contains("captured"), "{error}");
    };
    // a rejected call leaves the capture valid
    let graph = stream.capture(|| {
        add(&stream, &function, &numbers, 1)?;
        refused("waiting", stream.synchronize());
        refused("reading", stream.read(numbers.address(), &mut byte));
        refused("allocating", stream.allocate(10).map(drop));
        refused("capturing", stream.capture(|| Ok(())).map(drop));
        add(&stream, &function, &numbers, 1)
    })?;
    assert_eq!(graph.num_nodes(), 2);
    // an error of the work is returned
    let outcome = stream.capture(|| {
        add(&stream, &function, &numbers, 1)?;
        Err(DriverError::new("work", "failed"))
    });
    assert_eq!(outcome.expect_err("failed").to_string(), "work: failed");
    assert!(!stream.is_captured()?);
    // an error of the driver: another stream joined the capture and was not waited for
    let (other, event) = (stream.context().stream()?, stream.context().event()?);
    let outcome = stream.capture(|| {
        stream.record(&event)?;
        other.wait(&event)?;
        add(&other, &function, &numbers, 1)
    });
    let error = outcome.expect_err("not joined");
    assert!(error.to_string().contains("CUDA_ERROR_STREAM_CAPTURE_UNJOINED"), "{error}");
    for stream in [&stream, &other] {
        assert!(!stream.is_captured()?);
        add(stream, &function, &numbers, 1)?;
        stream.synchronize()?;
    }
    assert_eq!(numbers.download()?, [2; 100]);
    Ok(())
}

#[test]
fn several_streams_can_be_captured_into_one_graph() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let (a, b) = (stream.filled::<u32>(100, 0)?, stream.filled::<u32>(100, 0)?);
    let other = stream.context().stream()?;
    let (fork, join) = (stream.context().event()?, stream.context().event()?);
    let graph = stream.capture(|| {
        stream.record(&fork)?;
        other.wait(&fork)?;
        add(&stream, &function, &a, 1)?;
        add(&other, &function, &b, 2)?;
        other.record(&join)?;
        stream.wait(&join)?;
        stream.copy(a.address(), b.address(), 4)
    })?;
    assert_eq!(graph.num_nodes(), 3);
    graph.instantiate()?.launch(&stream)?;
    let mut expected = [1; 100];
    expected[0] = 2;
    assert_eq!(a.download()?, expected);
    Ok(())
}

#[test]
fn a_graph_is_updated_to_one_of_the_same_topology() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let function = stream.load(&written::add())?;
    let numbers = stream.filled::<u32>(100, 0)?;
    let adding = |value| stream.capture(|| add(&stream, &function, &numbers, value));
    let mut graph = adding(1)?.instantiate()?;
    graph.launch(&stream)?;
    graph.update(adding(10)?)?;
    graph.launch(&stream)?;
    assert_eq!(numbers.download()?, [11; 100]);
    let two = stream.capture(|| {
        add(&stream, &function, &numbers, 5)?;
        add(&stream, &function, &numbers, 5)
    })?;
    let error = graph.update(two).expect_err("another form");
    println!("{error}");
    assert!(error.to_string().contains("it has 1 nodes, the newer one 2"), "{error}");
    graph.launch(&stream)?;
    assert_eq!(numbers.download()?, [21; 100]);
    Ok(())
}

#[test]
fn memory_dropped_during_a_capture_is_freed_later() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let numbers = stream.upload(&[1_u32; 100])?;
    let large = stream.allocate(1 << 30)?;
    let graph = stream.capture(|| {
        drop(large);
        stream.fill(numbers.address(), 0, 400)
    })?;
    assert_eq!(graph.num_nodes(), 1);
    stream.synchronize()?;
    graph.instantiate()?.launch(&stream)?;
    assert_eq!(numbers.download()?, [0; 100]);
    Ok(())
}
