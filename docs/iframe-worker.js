// The site's search under file://, where browsers refuse workers: the worker's script in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          frame.onload = null;
          const inside = frame.contentWindow;
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          inside.document.head.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      );
    }

    terminate() {}
  };
}
