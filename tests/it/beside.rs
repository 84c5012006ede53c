//! What is done while rows are on their way to their experts: what tokens pass through besides is computed, forward and
//! backward; and rows that are needed first are sent first.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guildhall::moe::rewrites::schedule::in_steps;
use guildhall::moe::{
    self, Activation, Beside, Expert, ExpertsOnTape, Facts, History, Homes, Importance, LayerSizes, MoeLayer, Outgoing,
    Plan, Routing, Schedule, StepFacts, dispatch, through_experts,
};
use guildhall::parallel::collectives::Underway;
use guildhall::parallel::{ExpertTable, Init, Parameters, Rows, Weight};
use guildhall_comm::wrap::Wrapper;
use guildhall_comm::{Communicator, Error as CommError, Operation, Pending, Request};
use guildhall_tensor::{Dtype, Tape, Tensor, Var};

use crate::world::{on_mesh, shape};

/// Longer than any test takes, shorter than the world waits.
const TOO_LONG: Duration = Duration::from_secs(30);
const WIDTH: usize = 4;

/// Hands rows back. In backward it waits until it hears that it may go on, if it has someone to hear.
struct Slow(Mutex<Option<Receiver<()>>>);

impl std::fmt::Debug for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Slow")
    }
}

impl Expert for Slow {
    fn weights(&self, _: &Tape) -> Vec<Var> {
        Vec::new()
    }

    fn apply(&self, _: &[Var], rows: &Var, _: &[usize]) -> Var {
        let (rows_in, heard) = (rows.input(), self.0.lock().unwrap().take());
        rows.tape().op("slow", rows.value().clone(), &[rows], move |gradient, gradients| {
            if let Some(heard) = heard {
                heard.recv_timeout(TOO_LONG).expect("the other rank goes on without this one's gradients");
            }
            gradients.add(rows_in, gradient);
        })
    }
}

impl Parameters for Slow {
    fn visit(&mut self, _: &mut dyn FnMut(&mut Weight)) {}
}

/// Rank 1 sends nothing before rank 0 has done its work of the meantime: neither rows forward, nor gradients backward. It
/// would wait for ever if that work began when rows are there.
#[test]
fn other_work_is_done_while_rows_and_gradients_are_under_way() {
    let ([forward, backward], [may_send, may_return]): ([Sender<()>; 2], [Receiver<()>; 2]) = {
        let [there, back] = [channel(), channel()];
        ([there.0, back.0], [there.1, back.1])
    };
    let heard = Mutex::new(Some((may_send, may_return)));
    on_mesh(shape(2, 2), |rank, mesh| {
        let (tape, me) = (Tape::new(&rank.device), rank.world.rank());
        let x = tape.leaf(Tensor::from_fn(&rank.device, &[2, WIDTH], |i| i as f32 + 1.0));
        let routing = Routing::new(vec![0, 1], 1, 2);
        let plan = Plan::new(&routing, ExpertTable::even(2, 2), me).exchange(mesh).unwrap();
        let back = (me == 1).then(|| heard.lock().unwrap().take().unwrap()).map(|(may_send, may_return)| {
            may_send.recv_timeout(TOO_LONG).expect("rank 0 goes on without rank 1's rows");
            may_return
        });
        let calls = || rank.ledger.snapshot().values().map(|traffic| traffic.calls).sum::<u64>();
        let (before, experts) = (calls(), Slow(Mutex::new(back)));
        let meanwhile = || {
            assert_eq!(calls(), before + 1, "rows are on their way");
            let (to, told) = (x.input(), backward.clone());
            let besides = tape.op("besides", x.value().clone(), &[&x], move |gradient, gradients| {
                // Rank 1 has heard if it is the sender.
                let _ = told.send(());
                gradients.add(to, gradient);
            });
            if me == 0 {
                forward.send(()).unwrap();
            }
            Ok(besides)
        };
        let experts = ExpertsOnTape { experts: &experts, weights: &[] };
        let (home, besides) = through_experts(&x, &plan, experts, None, mesh, meanwhile).unwrap();
        let ones = Tensor::from_fn(&rank.device, &[2, WIDTH], |_| 1.0);
        let sum = Var::concat_rows(home).add(&besides);
        let gradients = tape.try_backward(&sum.dot_constant(ones)).unwrap();
        assert!(gradients.of(&x).unwrap().f32s().iter().all(|&gradient| gradient == 2.0), "of both ways");
    });
}

/// Writes down when it is asked, and what this rank had started by then.
#[derive(Debug)]
struct Noted {
    name: &'static str,
    expert: Box<dyn Expert>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl Expert for Noted {
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        self.expert.weights(tape)
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        self.log.lock().unwrap().push(self.name);
        self.expert.apply(weights, rows, counts)
    }
}

impl Parameters for Noted {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.expert.visit(f);
    }
}

/// A layer computes shared experts, and the network of a residual layer, before the experts that wait for rows.
#[test]
fn a_layer_computes_what_is_beside_its_experts_first() {
    for residual in [false, true] {
        on_mesh(shape(2, 2), |rank, mesh| {
            let sizes = LayerSizes {
                d_model: WIDTH,
                d_ff: 8,
                activation: Activation::SwiGlu,
                gates_shared: false,
                router_bias: false,
                dtype: Dtype::F32,
                adapters: None,
                inits: [Init::Normal { std: 0.3, seed: 1 }; 2],
            };
            let config = moe::Config { residual, shared_experts: usize::from(!residual), ..moe::Config::of(4, 1) };
            let mut layer = MoeLayer::new(&rank.device, ("layer", 0), config.widest(), &sizes, mesh);
            let log = Arc::new(Mutex::new(Vec::new()));
            let noted = |name, expert| Box::new(Noted { name, expert, log: log.clone() });
            layer.experts = noted("experts", layer.experts);
            layer.beside = match layer.beside {
                Beside::Shared(network) => Beside::Shared(noted("beside", network)),
                Beside::Residual(network, proportions) => Beside::Residual(noted("beside", network), proportions),
                other => panic!("{other:?}"),
            };
            let tape = Tape::new(&rank.device);
            let x = tape.leaf(Tensor::from_fn(&rank.device, &[6, WIDTH], |i| ((i * 37) % 11) as f32 / 11.0));
            let importance = Importance::new(&[0; 6], 6, vec![true; 6], 1.0);
            let facts = Facts {
                importance: &importance,
                homes: &Homes::default(),
                history: &History::default(),
                step: &StepFacts::of_training(0, 1),
            };
            layer.forward(&x, &mesh.stream(Rows::of_ids(0, &[0; 6])), &facts, mesh).unwrap();
            assert_eq!(*log.lock().unwrap(), ["beside", "experts"]);
        });
    }
}

/// A communicator that writes down how many elements each all-to-all sends to each rank.
struct Sends {
    inner: Arc<dyn Communicator>,
    counts: Arc<Mutex<Vec<Vec<usize>>>>,
}

impl Wrapper for Sends {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Sends { inner, counts: self.counts.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, CommError> {
        if let Operation::AllToAll { send_counts, .. } = &request.operation {
            self.counts.lock().unwrap().push(send_counts.clone());
        }
        self.inner.start(request)
    }
}

/// By the smart schedule half of a rank's own rows go first, then those for the next rank, for the one after it, and so on,
/// and the other half of its own last.
#[test]
fn rows_are_sent_in_the_order_of_a_schedules_steps() {
    const RANKS: usize = 4;
    on_mesh(shape(RANKS, RANKS), |rank, mesh| {
        let (tape, me) = (Tape::new(&rank.device), rank.world.rank());
        let routing = Routing::new((0..2 * RANKS as u32).map(|token| token / 2).collect(), 1, RANKS);
        let plan =
            in_steps(Plan::new(&routing, ExpertTable::even(RANKS, RANKS), me), &[Schedule::new(me, RANKS, RANKS)]);
        let plan = plan.exchange(mesh).unwrap();
        let counts = Arc::default();
        let group: Arc<dyn Communicator> = Arc::new(Sends { inner: mesh.expert.clone(), counts: Arc::clone(&counts) });
        let x = tape.leaf(Tensor::from_fn(&rank.device, &[2 * RANKS, WIDTH], |i| i as f32));
        let arriving = dispatch(&Outgoing::new(&x, &plan.plan, &mesh.tensor), &plan, &group).unwrap();
        arriving.into_iter().map(Underway::finish).for_each(|rows| drop(rows.unwrap()));
        let to = |shift: usize, rows: usize| {
            let mut sent = vec![0; RANKS];
            sent[(me + shift) % RANKS] = rows * WIDTH;
            sent
        };
        assert_eq!(*counts.lock().unwrap(), [to(0, 1), to(1, 2), to(2, 2), to(3, 2), to(0, 1)]);
    });
}
