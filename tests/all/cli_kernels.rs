//! `tilewright kernels`, run as a process without a GPU; with ptxas if the gate has installed it.

use crate::output::{error_text, printed, root, tilewright};
use std::{fs, path::PathBuf, process::Output};

/// Runs `tilewright kernels` with `cache` as the cache and an empty PATH, so without ptxas.
fn kernels(cache: &str, arguments: &[&str]) -> Output {
    let mut command = tilewright(&[&["kernels"], arguments].concat());
    command.env("TILEWRIGHT_CACHE", cache).env("PATH", "").output().unwrap()
}

/// The ptxas installed by `cargo xtask gate`.
fn ptxas() -> Option<PathBuf> {
    let folder = root().join("target/cuda-tools/lib");
    let pythons = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/ptxas"));
    let ptxas = found.find(|path| path.exists());
    if ptxas.is_none() {
        println!("skipped: there is no ptxas in target/cuda-tools");
    }
    ptxas
}

/// The first kernel with this name prefix; the rest of the name is its configuration.
fn kernel_with_prefix(prefix: &str) -> String {
    let known = tilewright_kernels::all().into_iter();
    known.map(|kernel| kernel.name).find(|name| name.starts_with(prefix)).unwrap()
}

/// The line of a report after this name.
#[track_caller]
fn row<'a>(report: &'a str, name: &str) -> &'a str {
    let line = report.lines().find_map(|line| line.strip_prefix(&format!("  {name:15} ")));
    line.unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// Whether a GPU is usable; tests that need a machine without one are skipped then.
fn has_gpu() -> bool {
    let found = tilewright_cuda::Context::open(0).is_ok();
    if found {
        println!("skipped: there is a GPU");
    }
    found
}

#[test]
fn the_list_has_all_known_and_cached_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("kernels");
    let cache = cache.to_str().unwrap();
    let output = kernels(cache, &["list"]);
    let report = printed(&output);
    assert!(report.starts_with(&format!("{cache}: 0 kernels, 0 B\n\nknown")), "{report}");
    for known in tilewright_kernels::all() {
        let line = report.lines().find(|line| line.split(' ').next() == Some(&known.name));
        let archs: Vec<String> = known.archs.iter().map(|arch| format!("sm_{arch}")).collect();
        assert!(line.is_some_and(|line| line.ends_with(&archs.join(", "))), "{} in {report}", known.name);
    }

    // a damaged entry
    fs::create_dir(cache).unwrap();
    let name = "ab".repeat(32);
    fs::write(format!("{cache}/{name}.kernel"), "nothing").unwrap();
    let output = kernels(cache, &["list"]);
    let report = printed(&output);
    assert!(report.starts_with(&format!("{cache}: 1 kernel, 7 B\n")), "{report}");
    assert!(report.contains(&format!("it is no kernel of ours: {name}\n")), "{report}");
    let output = kernels(cache, &["list", "--json"]);
    let report: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
    assert_eq!(
        (&report["folder"], report["cached"][0]["key"].as_str()),
        (&cache.into(), Some(name.as_str()))
    );
    assert_eq!(report["cached"][0]["damage"], "it is no kernel of ours");
    let known: Vec<&str> =
        report["known"].as_array().unwrap().iter().map(|known| known["kernel"].as_str().unwrap()).collect();
    for kernel in tilewright_kernels::all().into_iter().chain(tilewright_kernels::common()) {
        assert_eq!(known.iter().filter(|name| **name == kernel.name).count(), 1, "{}", kernel.name);
    }

    let output = kernels(cache, &["clear"]);
    assert_eq!(printed(&output), format!("removed 1 kernel, 7 B, from {cache}\n"));
    assert_eq!(fs::read_dir(cache).unwrap().count(), 0);
}

#[test]
fn a_bundle_is_built_without_a_gpu_and_listed_like_a_cache() {
    let Some(ptxas) = ptxas() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    let [bundle, ptxas] = [bundle.to_str().unwrap(), ptxas.to_str().unwrap()];
    let (norm, gemm) = (kernel_with_prefix("rmsnorm_bf16"), kernel_with_prefix("gemm_sm80"));
    let two = ["bundle", bundle, &norm, &gemm, "--arch", "sm_80,90", "--ptxas", ptxas];
    let output = kernels("off", &two);
    let report = printed(&output);
    assert!(report.starts_with("4 kernels, "), "{report}");
    assert!(report.contains(" kB, assembled by ptxas 1") && report.ends_with(&format!(", in {bundle}\n")));
    assert_eq!(fs::read_dir(bundle).unwrap().count(), 4);
    let output = kernels(bundle, &["list", "--json"]);
    let report: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
    let entries = report["cached"].as_array().unwrap();
    let rmsnorm = entries.iter().find(|entry| entry["kernel"] == norm).unwrap();
    assert!(rmsnorm["registers"].as_u64() > Some(16) && rmsnorm["stack_bytes"] == 0, "{rmsnorm}");

    let doctor = tilewright(&["doctor", "--bundle", bundle]).output().unwrap();
    let line = format!("bundle        {bundle}: 4 kernels for sm_80, sm_90 by ptxas 1");
    assert!(printed(&doctor).contains(&line), "{}", printed(&doctor));

    let why = error_text(&kernels("off", &two), 1);
    assert!(why.ends_with("it is not empty; a bundle is made in a folder of its own"), "{why}");
    let other = folder.path().join("other");
    let hopper = ["bundle", other.to_str().unwrap(), "gemm_sm90*", "--arch=80", "--ptxas", ptxas];
    let why = error_text(&kernels("off", &hopper), 1);
    assert!(
        why.contains("none of them is for sm_80: gemm_sm90_128x128_bf16_f32_pairs is for sm_90; "),
        "{why}"
    );
    assert!(!other.exists());
}

#[test]
fn a_kernel_is_shown_as_far_as_it_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().to_str().unwrap();
    let norm = &kernel_with_prefix("rmsnorm_bf16");
    for arch in ["90", "sm_90"] {
        let output = kernels(cache, &["inspect", norm, "--arch", arch, "--ptx"]);
        assert!(printed(&output).contains("\n.target sm_90\n"));
    }
    if !has_gpu() {
        let output = kernels(cache, &["inspect", norm]);
        let report = printed(&output);
        assert_eq!(row(report, "shown for"), "sm_120");
        assert!(row(report, "CTA").contains(" threads, at least "), "{report}");
        assert!(row(report, "shared memory").ends_with(" bytes a CTA"), "{report}");
        assert!(row(report, "parameters").contains("weight b64, "), "{report}");
        assert!(row(report, "machine code").starts_with("not known: kernels inspect: "), "{report}");
        assert!(row(report, "time").starts_with("not told: only attention kernels"), "{report}");
    }
    let Some(ptxas) = ptxas() else { return };
    let ptxas = ["inspect", norm, "--arch", "90", "--ptxas", ptxas.to_str().unwrap()];
    let output = kernels(cache, &ptxas);
    let report = printed(&output);
    assert!(row(report, "registers").ends_with(" a thread"), "{report}");
    assert_eq!(row(report, "spills"), "0 bytes a thread");
    assert_eq!(fs::read_dir(cache).unwrap().count(), 0, "inspect writes nothing to the cache");
}

#[test]
fn attention_times_are_over_one_decode_step() {
    // K and V of 64 requests, 4096 keys and 8 heads of 128 in bf16 are 2^30 bytes, Q and O of 32 heads 2^20; 2 multiply-adds per
    // key, query head and element are 2^32 operations
    let inspect = ["inspect", "attention_bf16_bf16_d128_128_sm80", "--roofline"];
    let output = kernels("off", &[&inspect[..], &["1000/100000"]].concat());
    let report = printed(&output);
    assert!(
        row(report, "over").starts_with("64 requests of 1 query row and 4096 keys in pages of 16: "),
        "{report}"
    );
    let expected = "at least 1.07 ms, bound by memory (memory 1.07 ms, compute 42.95 µs), at 1000.0 GB/s and 100000.0 GFLOP/s given";
    assert_eq!(row(report, "predicted"), expected);
    let output = kernels("off", &[&inspect[..], &["1000/1000"]].concat());
    assert!(row(printed(&output), "predicted").starts_with("at least 4.29 ms, bound by compute "));
    if !has_gpu() {
        assert!(row(report, "measured").starts_with("skipped: kernels inspect: context.open: "), "{report}");
        let output = kernels("off", &inspect[..2]);
        let why = row(printed(&output), "predicted");
        assert!(why.starts_with("not known: kernels inspect: context.open: "), "{why}");
        assert!(why.ends_with("; --roofline gives the limits of a machine"), "{why}");
    }
    let hooked = kernel_with_prefix("attention_scalar_f32_f32_d64_64_");
    let hooked = kernels("off", &["inspect", &hooked]);
    assert!(row(printed(&hooked), "time").starts_with("not told: "));
}

#[test]
fn unknown_kernels_and_architectures_are_rejected() {
    const WGMMA: &str = "attention_bf16_bf16_d128_128_wgmma";
    let inspect =
        |arguments: &[&str], code| error_text(&kernels("off", &[&["inspect"], arguments].concat()), code);
    let why = inspect(&["attention_bf16_bf16_d128_128_wgmna"], 2);
    assert!(why.contains("no kernel is named `attention_bf16_bf16_d128_128_wgmna`"), "{why}");
    let help = format!("help: there is {WGMMA}; `tilewright kernels list` names them all");
    assert!(why.contains(&help), "{why}");
    let why = inspect(&["rmsnorm*"], 1);
    assert!(why.contains("kernels inspect: rmsnorm* are "), "{why}");
    assert!(why.ends_with(" kernels, expected one"), "{why}");
    let why = inspect(&[WGMMA, "--arch", "80"], 1);
    assert!(why.contains("sm_80 was asked for; it needs sm_90a alone"), "{why}");
    for arch in ["sm_hopper", "-90"] {
        let why = inspect(&[WGMMA, "--arch", arch], 2);
        let expected = format!("'{arch}' for '--arch <ARCH>': expected an architecture, as in 90 or sm_90");
        assert!(why.contains(&expected), "{why}");
    }
    let why = inspect(&[WGMMA, "--ptxas", "/no/ptxas"], 1);
    assert!(why.contains("kernels: /no/ptxas: it does not start: "), "{why}");
}

#[test]
fn a_disabled_or_invalid_cache_is_an_error() {
    for command in ["list", "clear", "warm"] {
        let why = error_text(&kernels("off", &[command]), 1);
        assert!(why.contains("kernels: the cache is off"), "{command}: {why}");
        assert!(why.contains("help: let TILEWRIGHT_CACHE name a folder"), "{command}: {why}");
        let why = error_text(&kernels("kernels", &[command]), 1);
        assert!(
            why.contains("TILEWRIGHT_CACHE = \"kernels\", expected an absolute path"),
            "{command}: {why}"
        );
    }
    let why = error_text(&kernels("read-only:/k", &["warm"]), 1);
    assert!(why.contains("kernels warm: /k may only be read"), "{why}");
}

#[test]
fn errors_without_a_gpu_suggest_alternatives() {
    if has_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let why = error_text(&kernels(path, &["warm"]), 1);
    assert!(why.contains("kernels warm: context.open: "), "{why}");
    assert!(why.ends_with("help: without a GPU, `tilewright kernels bundle` assembles with ptxas"), "{why}");
    let why = error_text(&kernels("off", &["bundle", path]), 1);
    assert!(
        why.contains("kernels bundle: nothing can assemble: kernels: ptxas: it does not start: "),
        "{why}"
    );
    assert!(why.contains("help: `pip install nvidia-cuda-nvcc-cu12==12.9.86` brings a ptxas"), "{why}");
}

#[test]
fn help_lists_the_subcommands() {
    let output = kernels("off", &["--help"]);
    for command in ["list", "warm", "inspect", "bundle", "clear"] {
        assert!(printed(&output).lines().any(|line| line.trim().starts_with(command)), "{command}");
    }
}
