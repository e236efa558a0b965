//! The verifier: registers without values, limits of `setmaxnreg`.

use tilewright_ptx::{
    Builder, Invalid, Op, Var,
    ir::{Inst, Reg, Stmt},
    verify::check,
};

/// A kernel that reads a variable after `before`. It has enough registers that a set has several words.
fn read_after(before: impl FnOnce(&Builder, [Var<'_, u32>; 2])) -> Result<(), Invalid> {
    let kernel = Builder::kernel("k", 32, |k| {
        let words: Vec<_> = (1..100).map(|number| k.lane() + number).collect();
        let (x, y) = (k.unset_var::<u32>("x"), k.unset_var::<u32>("y"));
        before(k, [x, y]);
        k.global::<u32>("out").store(words.iter().fold(x.get(), |sum, word| sum + *word));
    });
    kernel.map(|_| ())
}

fn refused(before: impl FnOnce(&Builder, [Var<'_, u32>; 2])) {
    let why = read_after(before).map_err(|invalid| invalid.why);
    assert_eq!(why, Err("%x is read where it may not have been written".to_owned()));
}

#[test]
fn a_register_is_written_on_every_path_through_a_branch() {
    read_after(|k, [x, _]| k.when_else(k.lane().lt(1), || x.set(1), || x.set(2))).unwrap();
    refused(|k, [x, y]| k.when_else(k.lane().lt(1), || x.set(1), || y.set(2)));
    refused(|k, [x, _]| k.when(k.lane().lt(1), || x.set(1)));
    refused(|_, _| {});
}

#[test]
fn a_register_is_written_on_every_exit_of_a_loop() {
    read_after(|k, [x, y]| {
        k.loop_(|| {
            x.set(1);
            k.break_if(k.lane().lt(1));
            y.set(2);
            k.break_if(k.lane().lt(2));
        });
    })
    .unwrap();
    refused(|k, [x, _]| {
        k.loop_(|| {
            k.break_if(k.lane().lt(1));
            x.set(1);
            k.break_if(k.lane().lt(2));
        });
    });
    refused(|k, [x, _]| {
        k.loop_(|| {
            k.when(k.lane().lt(1), || {
                x.set(1);
                k.break_if(k.lane().lt(1));
            });
            k.break_if(k.lane().lt(2));
        });
    });
}

#[test]
fn limits_of_setmaxnreg_fit_the_registers_at_launch() {
    let kernel = |inc, dec| {
        let kernel = Builder::kernel("k", 384, |k| {
            let lower = || k.setmaxnreg_dec(dec);
            k.when_else(k.thread().ge(256), lower, || k.setmaxnreg_inc(inc));
        });
        kernel.map(|_| ()).map_err(|invalid| invalid.why)
    };
    assert_eq!((kernel(232, 40), kernel(240, 24)), (Ok(()), Ok(())));
    // 168 per thread
    let why =
        "the limits of setmaxnreg are 65536 registers, expected at most the 64512 of 384 threads at launch";
    assert_eq!(kernel(240, 32), Err(why.to_owned()));
}

#[test]
fn a_result_is_a_register_of_the_kernel() {
    let mut kernel = Builder::kernel("k", 32, |_| {}).unwrap();
    let at = std::panic::Location::caller();
    let inst = Inst { op: Op::SharedAddress(0), results: vec![Reg(70)], operands: Vec::new(), at };
    kernel.body.push(Stmt::Inst(inst));
    assert_eq!(check(&kernel).unwrap_err().why, "register 70 does not exist");
}
