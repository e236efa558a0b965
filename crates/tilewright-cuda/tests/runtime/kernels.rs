//! Kernels: PTX, machine code, and all kinds of launches.

use crate::{add, stream, written};
use tilewright::Dtype;
use tilewright_cuda::{Result, assemble, assemble_with_log, load};
use tilewright_kernels::gemm::{
    Epilogue,
    sm90::{self, Sm90Config},
};
use tilewright_ptx::Arg;

#[test]
fn machine_code_can_be_kept_and_loaded_again() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let (context, kernel) = (stream.context(), written::add());
    let assembled = assemble_with_log(context, "add", &context.ptx(&kernel)?)?;
    println!("{}", assembled.log);
    assert!(assembled.cubin.starts_with(b"\x7fELF"));
    assert_eq!(assemble(context, "add", &context.ptx(&kernel)?)?, assembled.cubin);
    let function = load(context, "add", &assembled.cubin)?.of_kernel(&kernel)?;
    let resources = function.resources();
    assert!((4..=64).contains(&resources.registers) && resources.local == 0, "{resources:?}");
    assert!(resources.threads >= written::THREADS && function.ctas_per_sm()? >= 4);
    let numbers = stream.upload(&[1_u32; 1000])?;
    add(&stream, &function, &numbers, 1)?;
    // PTX can be loaded too
    let from_text = load(context, "add", context.ptx(&kernel)?.as_bytes())?.of_kernel(&kernel)?;
    add(&stream, &from_text, &numbers, 1)?;
    drop((function, from_text));
    assert_eq!(numbers.download()?, [3; 1000]);
    Ok(())
}

#[test]
fn code_for_one_architecture_is_assembled() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    if stream.context().properties().arch != 90 {
        println!("skipped: the kernel is for sm_90a");
        return Ok(());
    }
    let epilogue = Epilogue { bias: None, out: Dtype::F32, paired: true, grouped: false };
    let config = Sm90Config { elements: Dtype::Bf16, tile_columns: 128, epilogue };
    let kernel = sm90::gemm("gemm", config).expect("a valid kernel");
    let function = stream.load(&kernel)?;
    assert_eq!(function.resources().local, 0);
    Ok(())
}

#[test]
fn launches_may_have_any_number_of_arguments() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    for params in [1, 90, 97, 300] {
        let function = stream.load(&written::sum_of(params))?;
        let sum = stream.filled::<u32>(1, 0xff)?;
        let numbers = (0..params as u32).map(|i| i * i);
        let args: Vec<Arg> =
            [Arg::U64(sum.address())].into_iter().chain(numbers.clone().map(Arg::U32)).collect();
        stream.launch(&function, [1, 1, 1], &args)?;
        assert_eq!(sum.download()?, [numbers.sum::<u32>()], "{params} parameters");
    }
    Ok(())
}

#[test]
fn a_cta_may_use_all_shared_memory() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    let most = stream.context().properties().shared_per_cta / 4;
    for len in [100, (48 << 8) + 1, most] {
        let function = stream.load(&written::reverse(len))?;
        let numbers = stream.upload(&(0..len as u32).collect::<Vec<_>>())?;
        stream.launch(&function, [1, 1, 1], &[Arg::U64(numbers.address())])?;
        let expected: Vec<u32> = (0..len as u32).rev().collect();
        assert!(numbers.download()? == expected, "{len} numbers");
    }
    Ok(())
}

#[test]
fn clusters_and_dependent_launches() -> Result<()> {
    let Some(stream) = stream() else { return Ok(()) };
    if stream.context().properties().arch < 90 {
        println!("skipped: both are Hopper's");
        return Ok(());
    }
    let numbers = stream.filled::<u32>(100_000, 0)?;
    let grid = [100_000_u32.div_ceil(written::THREADS).next_multiple_of(2), 1, 1];
    let args = [Arg::U64(numbers.address()), Arg::U32(100_000), Arg::U32(1)];
    let (clusters, dependent) =
        (stream.load(&written::add_in_clusters())?, stream.load(&written::add_dependent())?);
    stream.launch(&clusters, grid, &args)?;
    (0..100).try_for_each(|_| stream.launch(&dependent, grid, &args))?;
    // this kernel does not wait for its predecessor, so it must not start early
    let plain = stream.load(&written::add())?;
    (0..100).try_for_each(|_| stream.launch(&plain, grid, &args))?;
    assert!(numbers.download()? == vec![201; 100_000]);
    Ok(())
}
