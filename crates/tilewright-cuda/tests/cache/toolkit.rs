//! `ptxas` of the toolkit, if installed: in the build folder, where the gate of kernels installs it, or on `PATH`.

use std::path::{Path, PathBuf};
use tilewright_cuda::cache::{Cache, Footprint, Ptxas, Settings, Source};

fn ptxas() -> Option<Ptxas> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/cuda-tools/lib");
    let pythons = std::fs::read_dir(target).into_iter().flatten().flatten();
    let installed = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/ptxas"));
    let mut found = installed.chain([PathBuf::from("ptxas")]).filter_map(|path| Ptxas::at(path).ok());
    let ptxas = found.next();
    if ptxas.is_none() {
        println!("skipped: there is no ptxas in target/cuda-tools or on PATH");
    }
    ptxas
}

#[test]
fn kernels_are_assembled_and_have_a_footprint() {
    let Some(ptxas) = ptxas() else { return };
    let known = tilewright_kernels::all();
    let configured = known.iter().find(|kernel| kernel.name.starts_with("rmsnorm_bf16")).unwrap();
    let kernel = (configured.build)().unwrap();
    let cache = Cache::open(Settings::off()).unwrap();
    for arch in [80, 90, 120] {
        let code = cache.code(&Source::of(&kernel, arch).unwrap(), &ptxas).unwrap();
        assert_eq!(code.target, format!("sm_{arch}"));
        assert!(code.assembler.starts_with("ptxas 1"), "{}", code.assembler);
        let footprint = Footprint::of(&code.cubin).unwrap();
        assert!((16..=255).contains(&footprint.registers) && footprint.stack_bytes == 0, "{footprint:?}");
        assert!(footprint.code_bytes > 1000);
    }
}

/// A local array of 512 bytes per thread, read at an index that is unknown at compile time.
const WITH_A_STACK: &str = "
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{
    .local .align 4 .b8 d[512];
    .reg .b64 %a, %b, %c;
    .reg .b32 %i;
    ld.param.u64 %a, [p];
    ld.global.u32 %i, [%a];
    mov.u64 %b, d;
    cvt.u64.u32 %c, %i;
    add.u64 %b, %b, %c;
    st.local.u32 [%b], %i;
    ld.local.u32 %i, [%b+8];
    st.global.u32 [%a], %i;
    ret;
}
";

#[test]
fn the_footprint_contains_the_stack() {
    let Some(ptxas) = ptxas() else { return };
    let source = Source::new("k", "sm_90a", WITH_A_STACK);
    let code = Cache::open(Settings::off()).unwrap().code(&source, &ptxas).unwrap();
    assert_eq!(Footprint::of(&code.cubin).unwrap().stack_bytes, 512);
}

#[test]
fn the_log_of_ptxas_is_in_the_error() {
    let Some(ptxas) = ptxas() else { return };
    let wrong = Source::new("wrong", "sm_90a", ".version 8.0\n.target sm_90a\n.address_size 64\nnonsense\n");
    let why = Cache::open(Settings::off()).unwrap().code(&wrong, &ptxas).unwrap_err().to_string();
    assert!(why.starts_with("kernel wrong for sm_90a: the assembler refused it: ptxas 1"), "{why}");
    assert!(why.contains("the kernel's PTX, line 4; fatal"), "{why}");
}

#[test]
fn a_program_that_is_no_ptxas_is_refused() {
    let why = Ptxas::at("/no/such/ptxas").unwrap_err().to_string();
    assert!(why.starts_with("kernels: /no/such/ptxas: it does not start: "), "{why}");
    #[cfg(unix)]
    assert_eq!(
        Ptxas::at("true").unwrap_err().to_string(),
        "kernels: true: it does not say which ptxas it is"
    );
}
