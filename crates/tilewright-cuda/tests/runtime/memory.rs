//! Memory: round trips of all sizes, out of memory, and the caller's pointers.

use crate::{spin, stream, written};
use tilewright_cuda::{ErrorKind, Result, Stream};
use tilewright_ptx::Arg;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[test]
fn bytes_survive_a_round_trip() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    for len in [0, 1, 4095, 64 << 10, (64 << 10) + 1, 4 << 20, (4 << 20) + 1, 33 << 20] {
        let (memory, expected) = (stream.allocate(len)?, bytes(len));
        assert!(memory.address().is_multiple_of(256) && memory.address() > 0);
        stream.fill(memory.address(), 0xee, len)?;
        stream.write(memory.address(), &expected)?;
        let mut found = vec![0; len];
        stream.read(memory.address(), &mut found)?;
        assert!(found == expected, "{len} bytes");
        let second = stream.allocate(len)?;
        stream.copy(second.address(), memory.address(), len)?;
        drop(memory);
        stream.read(second.address(), &mut found)?;
        assert!(found == expected, "{len} bytes, copied");
    }
    Ok(())
}

#[test]
fn words_survive_a_round_trip() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    for words in [0_usize, 1, 16 << 10, (16 << 10) + 1, 1 << 20, (1 << 20) + 1] {
        let memory = stream.allocate(4 * words)?;
        let mut calls = 0;
        stream.write_words(memory.address(), words, &mut |made| {
            calls += 1;
            assert_eq!(made.len(), words);
            made.iter_mut().enumerate().for_each(|(at, word)| *word = at as u32 * 7 + 1);
        })?;
        assert_eq!(calls, usize::from(words > 0), "{words} words");
        let mut found = vec![0_u8; 4 * words];
        stream.read(memory.address(), &mut found)?;
        let right = |(at, word): (usize, &[u8; 4])| u32::from_le_bytes(*word) == at as u32 * 7 + 1;
        assert!(found.as_chunks().0.iter().enumerate().all(right), "{words} words");
    }
    Ok(())
}

#[test]
fn writes_wait_for_a_free_slot() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    for (len, writes) in [(5000, 200), (1 << 20, 12)] {
        let memory = stream.allocate(len * writes)?;
        let all = bytes(len * writes);
        spin(&stream, 30)?;
        let mut piece = vec![0; len];
        for (at, expected) in all.chunks(len).enumerate() {
            piece.copy_from_slice(expected);
            stream.write(memory.address() + (at * len) as u64, &piece)?;
            piece.fill(0xaa);
        }
        let mut found = vec![0; all.len()];
        stream.read(memory.address(), &mut found)?;
        assert!(found == all, "{writes} writes of {len} bytes");
    }
    Ok(())
}

#[test]
fn too_little_memory_is_an_error_with_the_numbers() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let (_, total) = stream.context().free_memory()?;
    // the driver reserves some
    for requested in [total - 4096, total + 1, usize::MAX] {
        let error = stream.allocate(requested).expect_err("too much");
        println!("{error}");
        let expected = [format!("{requested} bytes were asked for"), format!(" of {total} are free")];
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(expected.iter().all(|text| error.to_string().contains(text)), "{error}");
        assert!(error.to_string().starts_with("memory.allocate: "), "{error}");
    }
    // the stream is still usable
    assert_eq!(stream.filled::<u8>(1000, 5)?.download()?, [5; 1000]);
    Ok(())
}

#[test]
fn freed_memory_can_be_allocated_again() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let (free, _) = stream.context().free_memory()?;
    // in total twenty times the free memory
    for _ in 0..40 {
        let memory = stream.allocate(free / 2)?;
        stream.fill(memory.address(), 1, 1 << 20)?;
    }
    stream.synchronize()
}

#[test]
fn pointers_outside_of_gpu_memory_are_rejected() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let context = stream.context();
    let memory = stream.allocate(4096)?;
    context.check_pointer("q", memory.address(), 4096)?;
    context.check_pointer("q", memory.address() + 96, 4000)?;
    context.check_pointer("nothing", 0, 0)?;
    let on_host = vec![0_u8; 4096];
    let host = on_host.as_ptr() as u64;
    for (address, bytes, expected) in [
        (host, 4096, "is not memory of GPU 0"),
        (0, 1, "is not memory of GPU 0"),
        (memory.address(), usize::MAX >> 1, "are needed"),
    ] {
        let error = context.check_pointer("attention.run: q", address, bytes).expect_err("no such memory");
        println!("{error}");
        assert!(error.to_string().starts_with(&format!("attention.run: q: pointer {address:#x}")), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::Argument);
    }
    Ok(())
}

#[test]
fn objects_of_another_gpu_are_rejected() -> Result<()> {
    let (Some(stream), Ok(other)) = (stream(), Stream::open(1)) else {
        println!("skipped: it takes two GPUs");
        return Ok(());
    };
    let (memory, event) = (other.allocate(100)?, other.context().event()?);
    let function = other.load(&written::add())?;
    for (outcome, expected) in [
        (
            stream.context().check_pointer("q", memory.address(), 100),
            "is memory of GPU 1; it has to be memory of GPU 0",
        ),
        (stream.record(&event), "the event belongs to GPU 1, the stream to GPU 0"),
        (stream.context().borrow_stream(other.handle()).map(drop), "belongs to another context"),
        (
            stream.launch(&function, [1; 3], &[Arg::U64(memory.address()), Arg::U32(25), Arg::U32(1)]),
            "the kernel belongs to GPU 1, the stream to GPU 0",
        ),
    ] {
        let error = outcome.expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::Argument);
    }
    Ok(())
}
