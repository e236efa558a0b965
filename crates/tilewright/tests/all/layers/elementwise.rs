//! Elementwise operators against the oracle: dtypes, shapes, strides, special values, error texts.

use crate::arrays::{Array, DTYPES, F32_UNIT, Layout};
use tilewright::{
    Backend, Cpu, Dtype,
    elementwise::{ElementFunction, add, map_in_place},
    reference::elementwise::map,
};

const FUNCTIONS: [ElementFunction; 4] = [
    ElementFunction::Scale { factor: 0.22 },
    ElementFunction::Scale { factor: -48.0 },
    ElementFunction::SoftCap { cap: 30.0 },
    ElementFunction::SoftCap { cap: 0.75 },
];
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 5], [2, 64], [17, 1001], [0, 4], [3, 8], [2, 96], [1, 1024], [2, 2056]];
const LAYOUTS: [Layout; 3] = [Layout::Dense, Layout::Padded, Layout::Aligned];

fn functions_match_the_oracle<B: Backend>([backend]: &[B; 1]) {
    for function in FUNCTIONS {
        for (dtype, shape) in DTYPES.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
            for layout in LAYOUTS {
                let mut x = Array::random(dtype, &shape, layout, 3);
                let expected: Vec<f64> = x.values().into_iter().map(|x| map(function, x)).collect();
                map_in_place(backend, function, x.view_mut()).unwrap();
                // a quotient, a tangent of a few units and a product
                let slack = |i: usize| expected[i].abs() * 10.0 * F32_UNIT;
                x.assert_close(&expected, slack, &format!("{function:?} {dtype} {shape:?} {layout:?}"));
            }
        }
    }
}

fn sums_are_rounded_once<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (to, shape) in DTYPES.into_iter().flat_map(|to| SHAPES.map(|shape| (to, shape))) {
            for layout in LAYOUTS {
                let x = Array::random(dtype, &shape, layout, 4);
                let mut residual = Array::random(Dtype::F32, &shape, layout, 5);
                let mut out = Array::zeros(to, &shape, layout);
                let expected: Vec<f64> =
                    x.values().iter().zip(residual.values()).map(|(x, r)| x + r).collect();
                add(backend, x.view(), residual.view_mut(), out.view_mut()).unwrap();
                let slack = |i: usize| expected[i].abs() * 2.0 * F32_UNIT;
                let what = format!("{dtype} to {to} {shape:?} {layout:?}");
                residual.assert_close(&expected, slack, &what);
                out.assert_close(&expected, slack, &what);
            }
        }
    }
}

fn nan_infinity_and_signs_follow_the_formulas<B: Backend>([backend]: &[B; 1]) {
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e30, -1e-30];
    let mut x = Array::new(Dtype::F32, &[1, 6], Layout::Dense, &values);
    map_in_place(backend, ElementFunction::SoftCap { cap: 30.0 }, x.view_mut()).unwrap();
    let capped = x.values();
    assert!(capped[0].is_nan(), "{capped:?}");
    for (capped, expected) in capped[1..].iter().zip([30.0, -30.0, -0.0, 30.0, -1e-30f32]) {
        // a tangent may be off by a few units even where f32 has only 1
        let same = (capped - f64::from(expected)).abs() <= f64::from(expected.abs()) * 10.0 * F32_UNIT;
        assert!(same && capped.is_sign_negative() == expected.is_sign_negative(), "{capped} {expected}");
    }
}

crate::judge_backends!(
    functions_match_the_oracle,
    sums_are_rounded_once,
    nan_infinity_and_signs_follow_the_formulas
);

#[test]
fn refusals_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let array = |dtype, shape: &[usize]| Array::zeros(dtype, shape, Layout::Dense);
    let mapped = |function, shape: &[usize]| {
        map_in_place(&cpu, function, array(Dtype::F32, shape).view_mut()).unwrap_err().to_string()
    };
    let half = ElementFunction::Scale { factor: 0.5 };
    assert_eq!(mapped(half, &[4]), "elementwise.map_in_place: x has shape [4], expected [rows, width]");
    let infinite = ElementFunction::Scale { factor: f32::INFINITY };
    assert_eq!(mapped(infinite, &[1, 4]), "elementwise.map_in_place: factor = inf is not a finite number");
    let cap = ElementFunction::SoftCap { cap: 0.0 };
    assert_eq!(mapped(cap, &[1, 4]), "elementwise.map_in_place: cap = 0, expected a normal number above 0");
    let added = |residual: Dtype, shape: &[usize]| {
        let (mut residual, mut out) = (array(residual, &[2, 4]), array(Dtype::F32, shape));
        let x = array(Dtype::F32, &[2, 4]);
        add(&cpu, x.view(), residual.view_mut(), out.view_mut()).unwrap_err().to_string()
    };
    assert_eq!(
        added(Dtype::F32, &[2, 5]),
        "elementwise.add: out has shape [2, 5], expected [rows, width] = [2, 4]"
    );
    assert_eq!(added(Dtype::Bf16, &[2, 4]), "elementwise.add: residual is bf16, expected f32");
}
