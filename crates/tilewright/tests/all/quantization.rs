//! Conversions of the 8-bit dtypes against their definitions, for every pattern and every midpoint.

use tilewright::{
    Dtype, E4m3, E5m2, Element, View, ViewMut,
    reference::quantization::{decode, quantize},
};

fn e4m3(bits: u8) -> f64 {
    decode(Dtype::E4m3, bits)
}

fn e5m2(bits: u8) -> f64 {
    decode(Dtype::E5m2, bits)
}

fn same(a: f64, b: f64) -> bool {
    a.is_nan() && b.is_nan() || a == b
}

/// All values and midpoints of a format, each with its adjacent f32 values.
fn probes(meaning: fn(u8) -> f64) -> Vec<f32> {
    let mut values: Vec<f64> = (0..0x80).map(meaning).filter(|v| v.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let midpoints = values.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
    let largest = values[values.len() - 1];
    let mut probes: Vec<f64> = midpoints.chain(values.iter().copied()).collect();
    probes.extend([largest * 1.03, largest * 1.1, largest * 2.0, f64::from(f32::MAX), f64::INFINITY]);
    let near = probes.iter().flat_map(|&probe| {
        let probe = probe as f32;
        [probe, probe.next_up(), probe.next_down()]
    });
    near.flat_map(|probe| [probe, -probe]).chain([f32::MIN_POSITIVE, f32::from_bits(1)]).collect()
}

#[test]
fn every_pattern_decodes_to_its_defined_value() {
    for bits in 0..=u8::MAX {
        let (a, b) = (E4m3::from_bits(bits), E5m2::from_bits(bits));
        assert!(same(f64::from(a.to_f32()), e4m3(bits)), "e4m3 {bits:#x} is {a}, not {}", e4m3(bits));
        assert!(same(f64::from(b.to_f32()), e5m2(bits)), "e5m2 {bits:#x} is {b}, not {}", e5m2(bits));
        assert_eq!((a.to_bits(), b.to_bits()), (bits, bits));
        assert_eq!((a.is_nan(), b.is_nan()), (e4m3(bits).is_nan(), e5m2(bits).is_nan()));
        if !a.is_nan() {
            assert_eq!(E4m3::from_f32(a.to_f32()).to_bits(), bits, "there and back");
        }
        if b.to_f32().is_finite() {
            assert_eq!(E5m2::from_f32(b.to_f32()).to_bits(), bits, "there and back");
        }
        let byte = bits.cast_signed();
        assert_eq!(<i8 as Element>::from_f32(byte.to_f32()), byte);
    }
    assert_eq!((E4m3::MAX.to_f32(), E5m2::MAX.to_f32()), (448.0, 57344.0));
}

#[test]
fn rounding_is_to_nearest_even_and_saturates() {
    for value in probes(e4m3) {
        let (got, want) = (E4m3::from_f32(value), quantize(Dtype::E4m3, f64::from(value)));
        assert!(same(f64::from(got.to_f32()), want), "e4m3 of {value:e} is {got}, expected {want}");
    }
    for value in probes(e5m2) {
        let (got, want) = (E5m2::from_f32(value), quantize(Dtype::E5m2, f64::from(value)));
        assert!(same(f64::from(got.to_f32()), want), "e5m2 of {value:e} is {got}, expected {want}");
    }
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
        assert!(E4m3::from_f32(nan).is_nan() && E5m2::from_f32(nan).is_nan());
        assert_eq!(<i8 as Element>::from_f32(nan), 0, "int8 has no NaN");
    }
    let halves = (-300..300).map(|half| half as f32 / 2.0);
    for value in halves.flat_map(|v| [v, v.next_up(), v.next_down()]).chain([1e9, -1e9, f32::INFINITY]) {
        let got = <i8 as Element>::from_f32(value);
        assert_eq!(f64::from(got), quantize(Dtype::I8, f64::from(value)), "int8 of {value}");
    }
    for value in [0.0_f32, 1e-9, 2f32.powi(-10)] {
        assert_eq!((E4m3::from_f32(-value).to_bits(), E5m2::from_f32(-value * 1e-6).to_bits()), (0x80, 0x80));
    }
}

#[test]
fn the_oracle_matches_published_values() {
    // from the tables of the OCP specification
    let cases = [(0x01, 2f64.powi(-9)), (0x07, 0.875 * 2f64.powi(-6)), (0x08, 2f64.powi(-6)), (0x7e, 448.0)];
    cases.into_iter().for_each(|(bits, value)| assert_eq!(e4m3(bits), value));
    let cases =
        [(0x01, 2f64.powi(-16)), (0x03, 0.75 * 2f64.powi(-14)), (0x04, 2f64.powi(-14)), (0x7b, 57344.0)];
    cases.into_iter().for_each(|(bits, value)| assert_eq!(e5m2(bits), value));
    assert_eq!((e5m2(0x7c), e5m2(0xfc)), (f64::INFINITY, f64::NEG_INFINITY));
    assert_eq!([0x7d, 0x7e, 0x7f, 0xff].map(|bits| e5m2(bits).is_nan()), [true; 4]);
    assert_eq!([0x7f, 0xff].map(|bits| e4m3(bits).is_nan()), [true; 2]);
    assert_eq!((quantize(Dtype::E4m3, 17.0), quantize(Dtype::E4m3, 19.0)), (16.0, 20.0));
    assert_eq!((quantize(Dtype::E5m2, 9.0), quantize(Dtype::I8, -1e9)), (8.0, -128.0));
}

#[test]
fn dtype_names_sizes_and_maxima() {
    let all = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2, Dtype::I8];
    let names: Vec<String> = all.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["f32", "f16", "bf16", "e4m3", "e5m2", "int8"]);
    assert_eq!(all.map(Dtype::size), [4, 2, 2, 1, 1, 1]);
    assert_eq!(all.map(Dtype::is_cache_only), [false, false, false, true, true, true]);
    let largest = [f32::MAX, half::f16::MAX.to_f32(), half::bf16::MAX.to_f32(), 448.0, 57344.0, 127.0];
    assert_eq!(all.map(Dtype::max), largest);
}

#[test]
fn bytes_become_views_without_a_copy() {
    let mut bytes = [0x38_u8, 0xb8, 0x7e, 0x01];
    let view = View::new(E4m3::slice_from_bits(&bytes), &[2, 2]).expect("four elements");
    assert_eq!((view.dtype(), view.at(&[0, 1]), view.at(&[1, 0])), (Dtype::E4m3, -1.0, 448.0));
    assert_eq!(view.at(&[1, 1]), 2f32.powi(-9));
    let view = View::new(E5m2::slice_from_bits(&bytes), &[4]).expect("four elements");
    assert_eq!((view.dtype(), view.at(&[0])), (Dtype::E5m2, 0.5));
    let mut view = ViewMut::new(E4m3::slice_from_bits_mut(&mut bytes), &[4]).expect("four elements");
    view.set(&[0], 1e9);
    assert_eq!(view.as_view().at(&[0]), 448.0);
    ViewMut::new(E5m2::slice_from_bits_mut(&mut bytes), &[4]).expect("four elements").set(&[1], -2.0);
    assert_eq!(bytes, [0x7e, 0xc0, 0x7e, 0x01]);
    let integers = vec![-128_i8, 127];
    assert_eq!(View::new(&integers, &[2]).expect("two elements").at(&[0]), -128.0);
}

#[test]
fn values_compare_and_print_as_floats() {
    let one = E4m3::from_f32(1.0);
    assert_eq!((one.to_string(), format!("{one:?}")), ("1".to_owned(), "1.0".to_owned()));
    assert!(one < E4m3::MAX && E4m3::from_bits(0x7f) != E4m3::from_bits(0x7f));
    assert_eq!(E5m2::from_bits(0x80), E5m2::from_bits(0));
    assert_eq!(f32::from(E5m2::from_f32(-3.0)), -3.0);
}

/// Machines with VBMI test both conversions, others only the one without tables.
#[cfg(target_arch = "x86_64")]
#[test]
fn every_e4m3_is_exact_with_and_without_tables() {
    for tables in [false, true] {
        for first in (0..=u8::MAX).step_by(64) {
            let bytes: [u8; 64] = std::array::from_fn(|at| first + at as u8);
            let Some(converted) = tilewright::cpu::convert_e4m3(&bytes, tables) else {
                println!("skipped: this machine has no AVX-512 with tables: {tables}");
                continue;
            };
            for (byte, got) in bytes.into_iter().zip(converted) {
                let (got, want) = (got.to_f32(), E4m3::from_bits(byte).to_f32());
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{byte:#x} is {got}, not {want}, with tables: {tables}");
            }
        }
    }
}
